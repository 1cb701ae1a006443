"""Delayed publishing on RabbitMQ with kombu: declarations, retries and refusals."""

from __future__ import annotations

from contextlib import suppress
from time import time
from types import NoneType
from typing import Any

import pytest
from amqp.exceptions import (
    AccessRefused,
    InternalError,
    MessageNacked,
    NotFound,
    RecoverableConnectionError,
)
from kombu import Connection, Producer
from kombu.exceptions import OperationalError

from celery_native_delay import (
    CannotDelay,
    DelayTooLong,
    NotConfirmed,
    NotPermitted,
    PublishRefused,
    TopologyMismatch,
)
from celery_native_delay.due_time import due_us
from celery_native_delay.testing import PrivateRabbitMQ
from celery_native_delay.transports.interface import Wait, WorkerPart
from celery_native_delay.transports.rabbitmq import delays, topology
from celery_native_delay.transports.rabbitmq.channels import WindowChannel
from celery_native_delay.transports.rabbitmq.delays import RabbitDelays
from tests.integration.traffic import (
    TOPOLOGY,
    Arrival,
    Inbox,
    bind,
    bodies,
    declare_exchange,
    declare_queue,
    delaying,
    delays_of,
    delete_levels,
    depth,
    inbox,
    on_all_versions,
    parked_count,
)
from tests.traffic import beside, eta_in, publish
from tests.waiting import wait_until


def arrives(url: str, queue: str, count: int = 1) -> list[Arrival]:
    with inbox(url, queue) as letters:
        return letters.wait_for(count)


def assert_on_time(arrival: Arrival) -> None:
    """Check that a message waited in the broker until its due time."""
    assert arrival.waited
    assert arrival.lateness_seconds >= 0


@pytest.mark.skipif(not hasattr(Producer, "batch"), reason="kombu has it since 5.7")
def test_in_kombus_producer_batch_each_message_is_published_at_once(connection: Any) -> None:
    """As with kombu's own transport for RabbitMQ; delayed messages wait."""
    declare_queue(connection, "orders")
    producer = Producer(connection)
    with producer.batch():
        producer.publish("later", routing_key="orders", headers={"eta": eta_in(0.5)})
        producer.publish("now", routing_key="orders")
        wait_until(lambda: depth(connection, "orders") == 1)
    now, later = Inbox(connection).consume(["orders"]).wait_for(2)
    assert (now.body, later.body) == ("now", "later")
    assert_on_time(later)


# ---- retries and lost brokers ----------------------------------------------------------------


def test_a_publish_that_kombu_retries_keeps_its_delivery_id(
    connection: Any, vhost_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The confirm was lost, so the message is there twice; workers recognise the copy."""
    declare_queue(connection, "orders")
    wait_all = WindowChannel.wait_all
    lost: list[Any] = []

    def lose_the_first(self: Any, **options: Any) -> None:
        wait_all(self, **options)
        if not lost:
            lost.append(self)
            raise RecoverableConnectionError("connection lost")

    monkeypatch.setattr(WindowChannel, "wait_all", lose_the_first)
    publish(connection, "hello", "orders", delay=0.5, retry=True)
    publish(connection, "another", "orders", delay=0.5, retry=True)

    came = arrives(vhost_url, "orders", 3)
    assert sorted(bodies(came)) == ["another", "hello", "hello"]
    ids = {(a.body, a.message.native_delay.delivery_id) for a in came}
    assert len(ids) == 2


def test_a_confirm_that_never_comes_raises_in_time_and_does_not_concern_the_next_message(
    vhost_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_basic_ack = WindowChannel._on_basic_ack
    lost: list[int] = []

    def lose_the_first(self: Any, delivery_tag: int, multiple: bool) -> None:
        if lost:
            on_basic_ack(self, delivery_tag, multiple)
        lost.append(delivery_tag)

    monkeypatch.setattr(WindowChannel, "_on_basic_ack", lose_the_first)
    with delaying(vhost_url) as connection:
        delays_of(connection).prepare()
        declare_queue(connection, "orders")
        with pytest.raises(NotConfirmed, match=r"within 3 s, .* may have taken the message"):
            publish(connection, "hello", "orders", delay=0.5, retry=True, confirm_timeout=3)
        publish(connection, "another", "orders", delay=0.5)
    assert lost == [1, 2]
    assert sorted(bodies(arrives(vhost_url, "orders", 2))) == ["another", "hello"]


@pytest.mark.ci
def test_a_publish_during_a_memory_alarm_raises_in_time_and_arrives_afterwards(
    mortal_rabbitmq: PrivateRabbitMQ, mortal_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the publish has to declare something first: then kombu connects again."""
    monkeypatch.setattr(delays, "CONFIRM_SECONDS", 5)
    ctl = mortal_rabbitmq.rabbitmqctl

    def declared() -> bool:
        # A busy RabbitMQ 3.10 may answer the declaration of a quorum queue with INTERNAL_ERROR.
        with suppress(InternalError), delaying(mortal_url) as connection:
            delays_of(connection).prepare()
            return True
        return False

    wait_until(declared)
    with delaying(mortal_url) as connection:
        delays_of(connection).prepare()
        declare_queue(connection, "orders")
        ctl("set_vm_memory_high_watermark", "absolute", "1MB")
        try:
            with pytest.raises(NotConfirmed):
                publish(connection, "hello", "orders", delay=0.5)
            policy = {"max_retries": 1, "interval_start": 0}
            with pytest.raises((NotConfirmed, OperationalError)):
                publish(connection, "x", "another", delay=0.5, retry=True, retry_policy=policy)
        finally:
            ctl("set_vm_memory_high_watermark", "0.4")
    assert bodies(arrives(mortal_url, "orders")) == ["hello"]


def test_a_message_that_becomes_due_during_a_retry_is_confirmed(
    connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is published without a delay, and a nack is still raised."""
    declare_queue(connection, "full", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    publish(connection, "first", "full")
    due, tried = time() + 0.5, []
    wait_all = WindowChannel.wait_all

    def lose_the_connection_until_it_is_due(self: Any, **options: Any) -> None:
        if not tried:
            tried.append(self)
            wait_until(lambda: time() > due)
            raise RecoverableConnectionError("connection lost")
        wait_all(self, **options)

    monkeypatch.setattr(WindowChannel, "wait_all", lose_the_connection_until_it_is_due)
    policy = {"max_retries": 1, "interval_start": 0}
    with pytest.raises(OperationalError) as raised:
        publish(connection, "second", "full", delay=0.5, retry=True, retry_policy=policy)
    assert isinstance(raised.value.__cause__, MessageNacked)


def test_deleted_levels_are_declared_again_by_the_next_publish(
    connection: Any, vhost_url: str, rabbitmq: PrivateRabbitMQ
) -> None:
    """With the bindings that the connection knows."""
    declare_exchange(connection, "shop", "topic")
    declare_queue(connection, "orders")
    bind(connection, "orders", "shop", "order.#")
    publish(connection, "before", "order.new", exchange="shop", delay=0.1)
    assert bodies(arrives(vhost_url, "orders")) == ["before"]

    delete_levels(rabbitmq, vhost_url)
    publish(connection, "after", "order.new", exchange="shop", delay=3)
    publish(connection, "by name", "orders", delay=3)
    came = arrives(vhost_url, "orders", 2)
    assert sorted(bodies(came)) == ["after", "by name"]
    for arrival in came:
        assert_on_time(arrival)


# ---- refusals --------------------------------------------------------------------------------


def refused(connection: Any, error: type[Exception], match: str, **options: Any) -> None:
    """Check that a delayed publish raises *error*, and that the user's channel stays open."""
    if connection.default_channel.connection is None:
        connection.ensure_connection()
    channel = connection.default_channel
    options = {"routing_key": "orders", "delay": 1} | options
    with pytest.raises(error, match=match):
        publish(connection, "refused", **options)
    assert connection.default_channel is channel
    assert channel.is_open
    publish(connection, "immediate", "orders")
    wait_until(lambda: depth(connection, "orders") == 1)
    channel.queue_purge("orders")


def test_refused_publishes_leave_the_channel_open(connection: Any) -> None:
    declare_queue(connection, "orders")
    refused(connection, NotFound, "nowhere", exchange="nowhere")
    refused(connection, CannotDelay, "CC or BCC", headers={"CC": ["other"]})
    refused(connection, CannotDelay, "CC or BCC", headers={"BCC": ["other"]})
    refused(connection, DelayTooLong, r"longest delay of 5\.1 s.*celery beat", delay=10)
    # Undelayed messages may have CC.
    publish(connection, "copied", "nobody", headers={"CC": ["orders"]})
    publish(connection, "later", "orders", delay=0.1)
    letters = Inbox(connection).consume(["orders"])
    assert bodies(letters.wait_for(2)) == ["copied", "later"]


def level_arguments(name: str) -> dict[str, Any]:
    queues = (d for d in TOPOLOGY.plan() if isinstance(d, topology.Queue))
    return next(queue.arguments for queue in queues if queue.name == name)


@on_all_versions
def test_a_publish_names_a_level_queue_with_another_ttl(vhost_url: str) -> None:
    wrong = TOPOLOGY.level_queue(8)
    with Connection(vhost_url) as admin:
        declare_queue(admin, wrong, **(level_arguments(wrong) | {"x-message-ttl": 162}))
    connection = delaying(vhost_url)
    declare_queue(connection, "orders")
    refused(connection, TopologyMismatch, rf"x-message-ttl.*{wrong}.*doctor")
    refused(connection, TopologyMismatch, wrong)  # and again

    with Connection(vhost_url) as admin:
        admin.default_channel.queue_delete(wrong)
    publish(connection, "later", "orders", delay=0.1)
    assert bodies(Inbox(connection).consume(["orders"]).wait_for(1)) == ["later"]
    connection.release()


@on_all_versions
def test_a_user_without_configure_permission(
    rabbitmq: PrivateRabbitMQ, vhost_url: str, vhost: str
) -> None:
    """Delayed publishes are refused until another user has declared the levels."""
    limited_url = rabbitmq.add_user(f"limited-{vhost}", "secret", configure="^q.*", vhost=vhost)
    with delaying(limited_url) as connection:
        connection.default_channel.queue_declare("q.orders", durable=True, auto_delete=False)
        with pytest.raises(NotPermitted, match=r"configure.*delay declare"):
            publish(connection, "refused", "q.orders", delay=1)
        with pytest.raises(AccessRefused), connection.channel() as channel:
            channel.queue_declare("other", durable=True, auto_delete=False)
        publish(connection, "immediate", "q.orders")
        with delaying(vhost_url) as admin:
            delays_of(admin).prepare()
        publish(connection, "later", "q.orders", delay=0.5)
        assert bodies(arrives(vhost_url, "q.orders", 2)) == ["immediate", "later"]


# ---- destinations ----------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["k" * 255, "é" * 127 + "k", "%" * 100], ids=len)
@pytest.mark.parametrize("kind", ["direct", "topic"])
def test_a_long_routing_key(connection: Any, vhost_url: str, kind: str, key: str) -> None:
    """A long key travels as a hash, or, for a topic exchange, by its landing queue."""
    declare_exchange(connection, "shop", kind)
    for queue, bound in (("right", key), ("wrong", key[:-1])):
        declare_queue(connection, queue)
        bind(connection, queue, "shop", bound)
    with delaying(vhost_url) as producer:
        publish(producer, "one", key, exchange="shop", delay=0.5)
    publish(connection, "two", key, exchange="shop", delay=0.5)
    came = Inbox(connection).consume(["right", "wrong"]).wait_for(2)
    assert {(a.queue, a.body) for a in came} == {("right", "one"), ("right", "two")}
    assert {a.message.delivery_info["routing_key"] for a in came} == {key}


@pytest.mark.parametrize("kind", ["direct", "topic", "fanout", "headers"])
@pytest.mark.parametrize("overflow", ["drop-head", "reject-publish"])
def test_an_unbound_queue_gets_no_delayed_messages(
    connection: Any, vhost_url: str, kind: str, overflow: str
) -> None:
    declare_exchange(connection, "shop", kind)
    for queue in ("stays", "leaves"):
        declare_queue(connection, queue, **{"x-overflow": overflow})
        bind(connection, queue, "shop", "new", **{"x-match": "all"})
        bind(connection, queue, "shop", "old", **{"x-match": "any", "h": 1})
    letters = Inbox(connection).consume(["stays", "leaves"])
    publish(connection, "before", "new", exchange="shop", delay=0.1)
    letters.wait_for(2)
    letters.take()

    for arguments in ({"x-match": "all"}, {"x-match": "any", "h": 1}):
        key = "old" if "h" in arguments else "new"
        connection.default_channel.queue_unbind("leaves", "shop", key, arguments=arguments)
    with delaying(vhost_url) as stranger:
        for producer in (connection, stranger):
            publish(producer, "after", "new", exchange="shop", delay=0.1)
    publish(connection, "by name", "leaves", delay=0.2)
    came = letters.wait_for(3)
    assert sorted((a.queue, a.body) for a in came) == [
        ("leaves", "by name"),
        ("stays", "after"),
        ("stays", "after"),
    ]
    assert parked_count(connection) == 0


def test_an_auto_delete_queue_gets_its_messages_after_its_consumer_restarted(
    connection: Any, vhost_url: str
) -> None:
    """The producer does not know that the queue was deleted with its bindings in between."""
    for body in ("before", "after"):
        with delaying(vhost_url) as consumer:
            consumer.default_channel.queue_declare("brief", durable=True, auto_delete=True)
            letters = Inbox(consumer).consume(["brief"])
            publish(connection, body, "brief", delay=0.2)
            assert bodies(letters.wait_for(1)) == [body]
    assert parked_count(connection) == 0


@on_all_versions
@pytest.mark.parametrize("known_by", ["arguments", "passive", "nothing"])
def test_a_queue_with_reject_publish_gets_each_message_once(
    connection: Any, vhost_url: str, known_by: str
) -> None:
    """Only the connection that declared it knows its `x-overflow`."""
    arguments = {"x-overflow": "reject-publish"}
    declare_queue(connection, "small", **arguments)
    publish(connection, "one", "small", delay=0.1)
    with delaying(vhost_url) as other:
        if known_by == "arguments":
            declare_queue(other, "small", **arguments)
        elif known_by == "passive":
            other.default_channel.queue_declare("small", passive=True, auto_delete=False)
        bind(other, "small", "amq.topic", "small.#")
        letters = Inbox(other).consume(["small"])
        publish(other, "two", "small", delay=0.1)
        publish(other, "three", "small.one", exchange="amq.topic", delay=0.1)
        publish(connection, "four", "small.two", exchange="amq.topic", delay=0.1)
        publish(other, "last", "small", delay=1)
        came = bodies(letters.wait_for(5))
    assert sorted(came) == ["four", "last", "one", "three", "two"]
    assert came[-1] == "last"


# ---- due times -------------------------------------------------------------------------------


def test_no_message_comes_even_a_part_of_a_millisecond_too_early(
    vhost_url: str, connection: Any
) -> None:
    """Quorum queues note arrivals in whole milliseconds, rounded down."""
    declare_queue(connection, "orders")

    def send() -> None:
        for number in range(1000):
            publish(connection, number, "orders", delay=0.25)

    with inbox(vhost_url, "orders") as letters, beside(send, stop=lambda: None):
        came = letters.wait_for(1000)
    assert [arrival.lateness_seconds for arrival in came if arrival.lateness_seconds < 0] == []


# ---- content ---------------------------------------------------------------------------------


@on_all_versions
def test_a_message_that_expires_before_it_is_due_is_delivered_when_due(connection: Any) -> None:
    """The receiver sees that it has expired."""
    declare_queue(connection, "orders")
    publish(connection, "hello", "orders", delay=0.5, expiration=0.05)
    (arrival,) = Inbox(connection).consume(["orders"]).wait_for(1)
    assert_on_time(arrival)
    assert arrival.message.native_delay.expires_ms < arrival.at * 1000


def early(connection: Any, etas: dict[str, str]) -> tuple[WorkerPart, list[Wait]]:
    """Receive messages with these bodies from a plain producer, and the part to put them back."""
    declare_queue(connection, "orders")
    with Connection(connection.as_uri(include_password=True)) as plain:
        for body, eta in etas.items():
            Producer(plain).publish(body, routing_key="orders", headers={"eta": eta})
    channel = connection.default_channel
    came = [wait_until(lambda: channel.basic_get("orders")) for _ in etas]
    waits = [
        Wait(channel.message_to_python(each), "orders", due_us(eta))
        for each, eta in zip(came, etas.values(), strict=True)
    ]
    return channel.worker_part(channel.delays.settings), waits


def test_a_task_put_back_twice_has_one_delivery_id(connection: Any, vhost_url: str) -> None:
    """Put back twice after a lost confirm: both messages are copies of one delivery."""
    part, waits = early(connection, {"early": eta_in(0.5)})
    assert part.put_back(waits) == part.put_back(waits) == [None]
    waits[0].message.ack()
    with inbox(vhost_url, "orders") as letters:
        came = letters.wait_for(2)
    assert len({arrival.message.native_delay.delivery_id for arrival in came}) == 1


def test_a_batch_put_back_tells_which_message_the_broker_did_not_take(
    connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker tries only these again. The others come once, though one closed the channel."""
    etas = {body: eta_in(1.5) for body in ("good", "bad", "nacked", "last")}
    etas["far"] = "2300-01-01T00:00:00+00:00"
    part, waits = early(connection, etas)
    settle, wrapped = WindowChannel._settle, RabbitDelays._wrapped

    def nack(self: WindowChannel, *answer: Any) -> list[Any]:
        settled = settle(self, *answer)
        nacked = [each for each in settled if each.publication.message.body == b"nacked"]
        self._nacked += nacked
        return [each for each in settled if each not in nacked]

    def spoil(self: RabbitDelays, message: Any, *args: Any, **options: Any) -> Any:
        publication = wrapped(self, message, *args, **options)
        if message.body == b"bad":
            publication.message.properties["expiration"] = str(10**15)
        return publication

    monkeypatch.setattr(WindowChannel, "_settle", nack)
    results = part.put_back([wait for wait in waits if wait.message.body != "bad"])
    assert [type(result) for result in results] == [NoneType, MessageNacked, NoneType, NoneType]
    monkeypatch.setattr(RabbitDelays, "_wrapped", spoil)
    results = part.put_back(waits)
    expected = [NoneType, PublishRefused, MessageNacked, NoneType, NoneType]
    assert [type(result) for result in results] == expected


def test_two_messages_with_one_headers_dict_have_two_delivery_ids(
    connection: Any, vhost_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was nacked and given up; a consumer that drops repeated ids must get the second."""
    declare_queue(connection, "orders")
    wait_all = WindowChannel.wait_all
    nacked: list[Any] = []

    def nack_the_first(self: Any, **options: Any) -> None:
        wait_all(self, **options)
        if not nacked:
            nacked.append(self)
            raise MessageNacked("nacked")

    monkeypatch.setattr(WindowChannel, "wait_all", nack_the_first)
    producer, headers = Producer(connection), {"eta": eta_in(0.5)}
    with pytest.raises(MessageNacked):
        producer.publish("same", routing_key="orders", headers=headers)
    producer.publish("same", routing_key="orders", headers=headers)
    came = arrives(vhost_url, "orders", 2)
    assert len({arrival.message.native_delay.delivery_id for arrival in came}) == 2
