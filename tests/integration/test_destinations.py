"""A message goes where the exchanges, queues and bindings lead when it is due.

Also with names of queues, exchanges and virtual hosts as long as AMQP allows.
A broker's error text quotes the name and has at most 255 bytes. If it has to cut a text that is not
ASCII, RabbitMQ 4.3 closes the connection with 541, and 3.10 may send half a character. So delays
refuse such names before they ask the broker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from amqp.exceptions import ConsumerCancelled, NotFound
from kombu import Connection, Queue

from celery_native_delay import CannotDelay
from celery_native_delay.testing import PrivateRabbitMQ
from celery_native_delay.transports.rabbitmq import routes
from celery_native_delay.transports.rabbitmq.parking import rescue
from tests.brokers import on_one_version
from tests.integration.traffic import (
    Inbox,
    bind,
    bodies,
    declare_exchange,
    declare_queue,
    delaying,
    delays_of,
    parked_count,
)
from tests.traffic import PATIENCE_SECONDS, publish
from tests.waiting import wait_until


@pytest.fixture
def worker(connection: Any) -> Any:
    return connection


@pytest.fixture
def producer(vhost_url: str) -> Iterator[Any]:
    with delaying(vhost_url) as connection:
        delays_of(connection).prepare()
        yield connection


def serve(worker: Any, queue: str, exchange: str, kind: str, **arguments: Any) -> None:
    """Declare and bind a queue as a consuming worker does."""
    declare_exchange(worker, exchange, kind)
    declare_queue(worker, queue, **arguments)
    bind(worker, queue, exchange, "a")
    delays_of(worker).prepare(consuming=True)


def test_a_queue_that_is_bound_while_a_message_waits_gets_it(worker: Any, producer: Any) -> None:
    """A queue that is unbound meanwhile does not get it."""
    serve(worker, "old", "shop", "topic")
    publish(producer, "waits", "a", exchange="shop", delay=4)
    declare_queue(worker, "new")
    bind(worker, "new", "shop", "#")
    worker.default_channel.queue_unbind("old", "shop", "a")
    assert arrived(worker, "old", "new") == ("new", "waits")


@on_one_version
def test_a_message_goes_through_an_exchange_redeclared_with_another_type(
    worker: Any, producer: Any
) -> None:
    """A queue bound to the old exchange does not get it."""
    serve(worker, "old", "shop", "direct")
    publish(producer, "waits", "a", exchange="shop", delay=2)
    worker.default_channel.exchange_delete("shop")
    serve(worker, "new", "shop", "fanout")
    wait_until(lambda: parked_count(worker) == 1, timeout_seconds=PATIENCE_SECONDS)
    rescue(delays_of(worker))
    assert arrived(worker, "old", "new") == ("new", "waits")


@on_one_version
def test_a_producer_notices_that_an_exchange_has_another_type(
    worker: Any, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within ROUTE_SECONDS; messages sent later are not parked."""
    serve(worker, "old", "shop", "direct")
    declare_exchange(producer, "shop", "direct")
    bind(producer, "old", "shop", "a")
    monkeypatch.setattr(routes, "ROUTE_SECONDS", 0.0)
    publish(producer, "before", "a", exchange="shop", delay=0.2)
    assert arrived(worker, "old") == ("old", "before")
    worker.default_channel.exchange_delete("shop")
    serve(worker, "new", "shop", "fanout")
    publish(producer, "after", "a", exchange="shop", delay=0.2)
    assert arrived(worker, "old", "new") == ("new", "after")


@on_one_version
def test_a_producer_notices_that_an_exchange_is_deleted(
    worker: Any, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delayed publish raises NotFound, as an undelayed one does."""
    serve(worker, "old", "shop", "direct")
    monkeypatch.setattr(routes, "ROUTE_SECONDS", 0.0)
    publish(producer, "before", "a", exchange="shop", delay=0.2)
    worker.default_channel.exchange_delete("shop")
    with pytest.raises(NotFound):
        publish(producer, "after", "a", exchange="shop", delay=0.2)


@on_one_version
def test_deleting_a_queue_that_is_consumed_succeeds_and_its_consumer_learns_of_it(
    worker: Any,
) -> None:
    """The news is not raised out of the deletion."""
    serve(worker, "jobs", "shop", "direct")
    consumer = worker.Consumer(Queue("jobs", no_declare=True), callbacks=[print])
    consumer.consume()
    worker.default_channel.queue_delete("jobs")
    with pytest.raises(ConsumerCancelled):
        wait_until(lambda: worker.drain_events(timeout=1))


def arrived(connection: Any, *queues: str) -> tuple[str, Any]:
    """The queue and the body of the one message that comes."""
    letters = Inbox(connection).consume(queues)
    (came,) = letters.wait_for(1)
    letters.close()
    return came.queue, came.body


@pytest.fixture
def long_url(request: pytest.FixtureRequest, rabbitmq: PrivateRabbitMQ) -> Iterator[str]:
    """The url of a virtual host with the parameter as its name."""
    rabbitmq.api("PUT", f"/vhosts/{quote(request.param)}")
    permissions = dict.fromkeys(("configure", "write", "read"), ".*")
    rabbitmq.api("PUT", f"/permissions/{quote(request.param)}/guest", permissions)
    yield rabbitmq.url_of(request.param)
    rabbitmq.delete_vhost(request.param)


@on_one_version
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


@on_one_version
def test_a_refused_name_does_not_stop_the_delays_of_others(vhost_url: str) -> None:
    """A missing queue, too, whose refusal would close the connection."""
    with delaying(vhost_url) as connection:
        declare_queue(connection, "orders")
        with pytest.raises(CannotDelay):
            publish(connection, "later", "名" * 85, delay=0.2)
        publish(connection, "later", "orders", delay=0.2)
        assert bodies(Inbox(connection).consume(["orders"]).wait_for(1)) == ["later"]


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
