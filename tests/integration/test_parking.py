"""Messages whose destination is missing when they are due, has changed, or has a long name.

The parking queue has those that no queue was bound for, until their rescue. A broker's error text
quotes the name and has at most 255 bytes. If it has to cut a text that is not ASCII, RabbitMQ 4.3
closes the connection with 541, and 3.10 may send half a character. So delays refuse such names
before they ask the broker.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import time
from typing import Any
from urllib.parse import quote

import amqp
import pytest
from amqp.exceptions import ConsumerCancelled, NotFound, ResourceLocked
from kombu import Connection, Producer, Queue

from celery_native_delay import CannotDelay
from celery_native_delay.due_time import due_us
from celery_native_delay.keyed.record import HEADER as KEY
from celery_native_delay.message import HEADER, Delayed
from celery_native_delay.testing import PrivateRabbitMQ
from celery_native_delay.transports.interface import WorkerPart
from celery_native_delay.transports.rabbitmq import parking, routes
from celery_native_delay.transports.rabbitmq.parking import Rescue, peek, rescue
from tests.integration.traffic import (
    TOPOLOGY,
    Inbox,
    bind,
    bodies,
    declare_exchange,
    declare_queue,
    delaying,
    delays_of,
    inbox,
    on_all_versions,
    parked_count,
)
from tests.traffic import PATIENCE_SECONDS, eta_in, publish
from tests.waiting import wait_until


def wait_parked(connection: Any, number: int) -> None:
    wait_until(lambda: parked_count(connection) == number)


def rescued(connection: Any) -> Rescue:
    """The result of one rescue, with no other rescue running."""
    outcome = rescue(delays_of(connection))
    assert outcome is not None
    return outcome


def park(connection: Any, body: Any, routing_key: str, **options: Any) -> None:
    """A delayed message that is parked when it is due; wait for it with wait_parked()."""
    publish(connection, body, routing_key, **({"delay": 0.4} | options))


# ---- rescue ----------------------------------------------------------------------------------


@on_all_versions
def test_a_due_message_is_published_to_its_exchange(connection: Any, vhost_url: str) -> None:
    """So that queues bound by plain connections get it as well.

    Before, an installed queue is bound with another key, so the message goes by mirrored bindings
    and is parked.
    """
    declare_exchange(connection, "shop", "topic")
    declare_queue(connection, "ours")
    bind(connection, "ours", "shop", "other.#")
    Inbox(connection).consume(["ours"]).close()
    content = {"headers": {"x-mine": 1}, "priority": 7, "expiration": 600, "correlation_id": "c"}
    park(connection, "hello", "order.new", exchange="shop", **content)
    wait_parked(connection, 1)
    assert rescued(connection) == Rescue(still_parked=1)

    bind(connection, "ours", "shop", "order.*")
    with Connection(vhost_url) as stranger:
        declare_queue(stranger, "theirs")
        bind(stranger, "theirs", "shop", "*.new")
        assert rescued(connection) == Rescue(delivered=1)
        foreign = Inbox(stranger).consume(["theirs"]).wait_for(1)[0].message
    with inbox(vhost_url, "ours") as letters:
        (arrival,) = letters.wait_for(1)
    message = arrival.message
    for seen in (message, foreign):
        info, properties = seen.delivery_info, seen.properties
        assert (info["exchange"], info["routing_key"]) == ("shop", "order.new")
        assert (properties["priority"], properties["correlation_id"]) == (7, "c")
        assert seen.headers["x-mine"] == 1
    assert message.headers.keys() == {"x-mine", "eta"}
    assert message.properties["expiration"] == "600000"
    assert int(foreign.properties["expiration"]) < 600_000
    assert arrival.waited


@pytest.mark.parametrize("consumer", ["plain", "installed"])
def test_a_cancelled_message_stays_cancelled(
    connection: Any, vhost_url: str, consumer: str
) -> None:
    """Put back or moved from another broker. For a plain worker it has expired long ago."""
    eta = eta_in(0)
    headers = {"task": "t", "id": "task-1", "eta": eta, "expires": "2999-01-01T00:00:00+00:00"}
    message = amqp.Message("hello", application_headers=dict(headers))
    delays = delays_of(connection)
    delayed = Delayed("d", due_us(eta), "", "orders", cancelled=True)
    assert delays.put_back([(message, delayed)]) == [None]
    wait_parked(connection, 1)
    declare_queue(connection, "orders")
    assert rescued(connection) == Rescue(delivered=1)
    options = {"native_delay": True} if consumer == "installed" else {}
    with Connection(vhost_url, transport_options=options) as receiving:
        seen = Inbox(receiving).consume(["orders"]).wait_for(1)[0].message
    if consumer == "plain":
        assert seen.headers["expires"].startswith("2000-")
    else:
        assert seen.native_delay.cancelled
        assert seen.headers["expires"] == headers["expires"]


def test_expired_messages_are_dropped(connection: Any) -> None:
    park(connection, "stale", "orders", expiration=0.2)
    park(connection, "fresh", "orders", expiration=600)
    park(connection, "later", "last", delay=1)  # then the first has expired
    wait_parked(connection, 3)
    declare_queue(connection, "orders")
    assert rescued(connection) == Rescue(delivered=1, expired=1, still_parked=1)
    assert bodies(Inbox(connection).consume(["orders"]).wait_for(1)) == ["fresh"]


def test_an_expired_task_with_a_key_is_delivered_to_free_its_key(connection: Any) -> None:
    """Neither RabbitMQ nor the rescue drops it: a worker drops it, and frees the key."""
    headers = {"task": "t", KEY: {"v": 1, "kind": "unique", "key": "a", "until": "end"}}
    park(connection, "stale", "orders", expiration=0.2, headers=headers)
    park(connection, "fresh", "orders", expiration=1.5, headers=headers)
    wait_parked(connection, 2)
    declare_queue(connection, "last")
    publish(connection, "later", "last", delay=1.5)  # by then both have expired
    declare_queue(connection, "orders")
    assert rescued(connection) == Rescue(delivered=2)
    Inbox(connection).consume(["last"]).wait_for(1)
    for arrival in Inbox(connection).consume(["orders"]).wait_for(2):
        assert arrival.message.native_delay.expires_ms < time() * 1000


def test_foreign_messages_stay_parked(connection: Any) -> None:
    """Messages that somebody else published to the parking queue are not deleted."""
    junk: list[Any] = [None, {}, *({HEADER: each} for each in ("x", {"v": 99, "due": 0}, {"v": 1}))]
    for index, headers in enumerate(junk):
        to = {"routing_key": TOPOLOGY.parking_queue, "headers": headers}
        Producer(connection).publish(index, **to)
    park(connection, "ours", "nobody")
    wait_parked(connection, len(junk) + 1)
    declare_queue(connection, "nobody")
    assert rescued(connection) == Rescue(delivered=1, still_parked=len(junk))
    wait_parked(connection, len(junk))
    assert rescued(connection) == Rescue(still_parked=len(junk))
    assert bodies(Inbox(connection).consume(["nobody"]).wait_for(1)) == ["ours"]


def test_messages_of_a_deleted_exchange_stay_parked(connection: Any, vhost_url: str) -> None:
    def declare() -> None:
        declare_exchange(connection, "shop", "direct")
        declare_queue(connection, "orders")
        bind(connection, "orders", "shop", "new")

    declare()
    publish(connection, "lost", "new", exchange="shop", delay=0.5)
    with Connection(vhost_url) as admin:
        admin.default_channel.queue_delete("orders")
        admin.default_channel.exchange_delete("shop")
    wait_parked(connection, 1)
    park(connection, "other", "elsewhere")
    wait_parked(connection, 2)
    declare_queue(connection, "elsewhere")
    assert rescued(connection) == Rescue(delivered=1, still_parked=1)
    declare()
    assert rescued(connection) == Rescue(delivered=1)
    assert bodies(Inbox(connection).consume(["orders"]).wait_for(1)) == ["lost"]


# ---- one rescue at a time, and its limits ----------------------------------------------------


def test_a_rescue_delivers_once_what_a_full_queue_takes(connection: Any) -> None:
    """The queue refuses the others, which stay parked; the next rescue repeats none."""
    for number in range(3):
        park(connection, number, "full")
    wait_parked(connection, 3)
    declare_queue(connection, "full", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    outcome = rescued(connection)
    assert 1 <= outcome.delivered < 3
    assert outcome.still_parked == 3 - outcome.delivered
    letters = Inbox(connection).consume(["full"])
    letters.wait_for(outcome.delivered)
    wait_until(lambda: rescued(connection).still_parked == 0)
    assert sorted(bodies(letters.wait_for(3))) == [0, 1, 2]


def test_one_rescue_runs_at_a_time(connection: Any, vhost_url: str) -> None:
    park(connection, "hello", "nobody")
    wait_parked(connection, 1)
    with delaying(vhost_url) as other:
        lock = other.connection.channel()
        lock.queue_declare(TOPOLOGY.rescue_lock_queue, exclusive=True, auto_delete=True)
        assert rescue(delays_of(connection)) is None
        with pytest.raises(ResourceLocked):
            peek(delays_of(connection), limit=1)
        publish(connection, "x", "nobody")  # and the connection is none the worse for it
    # The lock ends with its connection.
    wait_until(lambda: rescue(delays_of(connection)) == Rescue(still_parked=1))
    wait_parked(connection, 1)
    assert rescued(connection) == Rescue(still_parked=1)


def test_a_round_publishes_few_messages_again_that_nobody_wants(
    connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it leaves come first in the next round."""
    for number in range(5):
        park(connection, number, "nobody")
    wait_parked(connection, 5)
    monkeypatch.setattr(parking, "BATCH", 1)
    monkeypatch.setattr(parking, "UNWANTED", 2)
    assert rescued(connection) == Rescue(still_parked=2)
    wait_parked(connection, 5)
    declare_queue(connection, "nobody")
    assert rescued(connection) == Rescue(delivered=5)


def test_all_workers_pause_after_a_round_that_left_messages_parked(
    connection: Any, vhost_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, a hundred workers would publish the parked messages again without end."""
    park(connection, "hello", "nobody")
    wait_parked(connection, 1)
    monkeypatch.setattr(parking, "PAUSE_SECONDS", 4.0)
    with delaying(vhost_url) as other:
        first, second = map(part_of, (connection, other))
        assert first.rescue_in_turn() == Rescue(still_parked=1)
        assert first.rescue_in_turn() is None
        assert second.rescue_in_turn() is None
        # Without the pause: at a worker's start, after a new binding, and by command.
        assert second.rescue() == Rescue(still_parked=1)
        wait_until(lambda: second.rescue_in_turn() == Rescue(still_parked=1))
        declare_queue(other, "nobody")
        assert first.rescue() == Rescue(delivered=1)
        assert second.rescue_in_turn() == Rescue()


def part_of(connection: Any) -> WorkerPart:
    channel = connection.default_channel
    part: WorkerPart = channel.worker_part(channel.delays.settings)
    return part


def test_peek_leaves_the_order_of_messages(
    connection: Any, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    for number in range(5):
        park(connection, number, f"nobody-{number}", delay=1 + 0.2 * number)
    Producer(connection).publish("junk", routing_key=TOPOLOGY.parking_queue)
    wait_parked(connection, 6)
    looks = []
    for _ in range(30):  # RabbitMQ 4.3 drops a message at its 21st requeue
        found = peek(delays_of(connection), limit=4)
        looks.append([item.delayed and item.delayed.routing_key for item in found])
    assert looks == [looks[0]] * 30
    assert len(looks[0]) == 4
    wait_parked(connection, 6)
    found = peek(delays_of(connection), limit=100)
    keys = [item.delayed.routing_key for item in found if item.delayed is not None]
    assert sorted(keys) == [f"nobody-{number}" for number in range(5)]
    wait_parked(connection, 6)

    for number in range(5):
        declare_queue(connection, f"nobody-{number}")
    assert rescued(connection) == Rescue(delivered=5, still_parked=1)


@on_all_versions
def test_another_users_message_keeps_its_user_id(
    connection: Any, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    """RabbitMQ closes a channel that publishes another user's id; rescue goes on."""
    url = rabbitmq.add_user(f"worker-{vhost}", "secret", vhost=vhost)
    park(connection, "signed", "nobody", user_id="guest")
    Producer(connection).publish("junk", routing_key=TOPOLOGY.parking_queue, user_id="guest")
    wait_parked(connection, 2)
    with delaying(url) as worker:
        assert rescued(worker) == Rescue(still_parked=2)
        wait_parked(connection, 2)
        declare_queue(connection, "nobody")
        assert rescued(worker) == Rescue(delivered=1, still_parked=1)
        (came,) = Inbox(worker).consume(["nobody"]).wait_for(1)
    assert came.body == "signed"
    assert came.message.properties["user_id"] == "guest"


# ---- changed destinations --------------------------------------------------------------------


@pytest.fixture
def producer(vhost_url: str) -> Iterator[Any]:
    with delaying(vhost_url) as connection:
        delays_of(connection).prepare()
        yield connection


def serve(connection: Any, queue: str, exchange: str, kind: str, **arguments: Any) -> None:
    """Declare and bind a queue as a consuming worker does."""
    declare_exchange(connection, exchange, kind)
    declare_queue(connection, queue, **arguments)
    bind(connection, queue, exchange, "a")
    delays_of(connection).prepare(consuming=True)


@on_all_versions
def test_a_queue_that_is_bound_while_a_message_waits_gets_it(
    connection: Any, producer: Any
) -> None:
    """A queue that is unbound meanwhile does not get it."""
    serve(connection, "old", "shop", "topic")
    publish(producer, "waits", "a", exchange="shop", delay=4)
    declare_queue(connection, "new")
    bind(connection, "new", "shop", "#")
    connection.default_channel.queue_unbind("old", "shop", "a")
    assert arrived(connection, "old", "new") == ("new", "waits")


def test_a_message_goes_through_an_exchange_redeclared_with_another_type(
    connection: Any, producer: Any
) -> None:
    """A queue bound to the old exchange does not get it."""
    serve(connection, "old", "shop", "direct")
    publish(producer, "waits", "a", exchange="shop", delay=2)
    connection.default_channel.exchange_delete("shop")
    serve(connection, "new", "shop", "fanout")
    wait_until(lambda: parked_count(connection) == 1, timeout_seconds=PATIENCE_SECONDS)
    rescue(delays_of(connection))
    assert arrived(connection, "old", "new") == ("new", "waits")


def test_a_producer_notices_that_an_exchange_has_another_type(
    connection: Any, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within ROUTE_SECONDS; messages sent later are not parked."""
    serve(connection, "old", "shop", "direct")
    declare_exchange(producer, "shop", "direct")
    bind(producer, "old", "shop", "a")
    monkeypatch.setattr(routes, "ROUTE_SECONDS", 0.0)
    publish(producer, "before", "a", exchange="shop", delay=0.2)
    assert arrived(connection, "old") == ("old", "before")
    connection.default_channel.exchange_delete("shop")
    serve(connection, "new", "shop", "fanout")
    publish(producer, "after", "a", exchange="shop", delay=0.2)
    assert arrived(connection, "old", "new") == ("new", "after")


def test_a_producer_notices_that_an_exchange_is_deleted(
    connection: Any, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delayed publish raises NotFound, as an undelayed one does."""
    serve(connection, "old", "shop", "direct")
    monkeypatch.setattr(routes, "ROUTE_SECONDS", 0.0)
    publish(producer, "before", "a", exchange="shop", delay=0.2)
    connection.default_channel.exchange_delete("shop")
    with pytest.raises(NotFound):
        publish(producer, "after", "a", exchange="shop", delay=0.2)


def test_deleting_a_queue_that_is_consumed_succeeds_and_its_consumer_learns_of_it(
    connection: Any,
) -> None:
    """The news is not raised out of the deletion."""
    serve(connection, "jobs", "shop", "direct")
    consumer = connection.Consumer(Queue("jobs", no_declare=True), callbacks=[print])
    consumer.consume()
    connection.default_channel.queue_delete("jobs")
    with pytest.raises(ConsumerCancelled):
        wait_until(lambda: connection.drain_events(timeout=1))


def arrived(connection: Any, *queues: str) -> tuple[str, Any]:
    """The queue and the body of the one message that comes."""
    letters = Inbox(connection).consume(queues)
    (came,) = letters.wait_for(1)
    letters.close()
    return came.queue, came.body


# ---- long names ------------------------------------------------------------------------------


@pytest.fixture
def long_url(request: pytest.FixtureRequest, rabbitmq: PrivateRabbitMQ) -> Iterator[str]:
    """The url of a virtual host with the parameter as its name."""
    rabbitmq.api("PUT", f"/vhosts/{quote(request.param)}")
    permissions = dict.fromkeys(("configure", "write", "read"), ".*")
    rabbitmq.api("PUT", f"/permissions/{quote(request.param)}/guest", permissions)
    yield rabbitmq.url_of(request.param)
    rabbitmq.delete_vhost(request.param)


@pytest.mark.parametrize(
    ("long_url", "name"),
    [
        pytest.param("short", "名" * 85, id="chinese name"),
        pytest.param("虚" * 85, "n" * 255, id="chinese virtual host"),
        pytest.param("虚" * 40, "orders", id="short name there", marks=pytest.mark.ci),
    ],
    indirect=["long_url"],
)
def test_a_name_that_the_broker_cannot_quote_is_refused_for_delays_only(
    long_url: str, name: str
) -> None:
    """The connection still declares, consumes, publishes immediate messages, and deletes."""
    with delaying(long_url) as connection:
        connected = connection.connection
        declare_queue(connection, name, **{"x-overflow": "reject-publish"})
        declare_exchange(connection, name, "topic", **{"alternate-exchange": "amq.fanout"})
        bind(connection, name, name, "new")
        letters = Inbox(connection).consume([name])
        for exchange, key in (("", name), (name, "new")):
            publish(connection, "now", key, exchange=exchange)
            with pytest.raises(CannotDelay, match="or 130 bytes together"):
                publish(connection, "later", key, exchange=exchange, delay=0.2)
        assert bodies(letters.wait_for(2)) == ["now", "now"]
        letters.close()
        connection.default_channel.queue_unbind(name, name, "new")
        connection.default_channel.exchange_delete(name)
        connection.default_channel.queue_delete(name)
        assert connection.connection is connected


def test_a_refused_name_does_not_stop_the_delays_of_others(vhost_url: str) -> None:
    """A missing queue, too, whose refusal would close the connection."""
    with delaying(vhost_url) as connection:
        declare_queue(connection, "orders")
        with pytest.raises(CannotDelay):
            publish(connection, "later", "名" * 85, delay=0.2)
        publish(connection, "later", "orders", delay=0.2)
        assert bodies(Inbox(connection).consume(["orders"]).wait_for(1)) == ["later"]


@on_all_versions
@pytest.mark.parametrize(
    ("long_url", "name"),
    [
        pytest.param("short", "名" * 38, id="chinese name"),
        pytest.param("v" * 255, "n" * 255, id="ascii", marks=pytest.mark.ci),
    ],
    indirect=["long_url"],
)
def test_delayed_messages_arrive_at_queues_and_exchanges_of_any_name(
    long_url: str, name: str
) -> None:
    """A queue, and an exchange of each type, declared by a plain or an installed connection."""

    def assert_arrives(by: Any, queue: str, key: str, exchange: str = "") -> None:
        letters = Inbox(by).consume([queue])
        with delaying(long_url) as producer:
            publish(producer, "now", key, exchange=exchange)
            publish(producer, "later", key, exchange=exchange, delay=0.2)
            assert bodies(letters.wait_for(2)) == ["now", "later"]
        letters.close()
        by.default_channel.queue_delete(queue)

    with Connection(long_url) as stranger, delaying(long_url) as consumer:
        for by, arguments in ((stranger, {}), (consumer, {"x-overflow": "reject-publish"})):
            declare_queue(by, name, **arguments)
            assert_arrives(by, name, name)
            for kind in ("direct", "topic", "fanout", "headers"):
                declare_exchange(by, name, kind)
                declare_queue(by, "orders")
                bind(by, "orders", name, "new")
                assert_arrives(by, "orders", "new", name)
                by.default_channel.exchange_delete(name)
