"""``Producer.batch()`` of kombu 5.7: held back, sent together, confirmed, delayed as ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection, Producer

from celery_native_delay import CannotDelay, DelayTooLong, PublishRefused
from tests.integration.traffic import (
    bodies,
    declare_exchange,
    declare_queue,
    delaying,
    delays_of,
    depth,
    inbox,
)
from tests.traffic import eta_in
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(
    not hasattr(Producer, "batch"), reason="kombu has Producer.batch() since 5.7"
)


@pytest.fixture
def connection(vhost_url: str) -> Iterator[Any]:
    with delaying(vhost_url) as connection:
        delays_of(connection).prepare()
        declare_queue(connection, "orders")
        yield connection


def send(producer: Any, body: Any, *, delay: float | None = None, **options: Any) -> None:
    headers = dict(options.pop("headers", {}))
    if delay is not None:
        headers["eta"] = eta_in(delay)
    options = {"routing_key": "orders"} | options
    producer.publish(body, headers=headers, **options)


def test_a_batch_is_confirmed_when_it_ends(connection: Any, vhost_url: str) -> None:
    """Immediate and delayed messages alike; nothing leaves before."""
    producer = Producer(connection)
    assert producer.supports_batch_publish
    with producer.batch():
        for number in range(300):
            send(producer, number)
            send(producer, -1 - number, delay=2)
        assert depth(connection, "orders") == 0
    assert depth(connection, "orders") == 300
    with inbox(vhost_url, "orders") as letters:
        came = letters.wait_for(600)
    assert sorted(bodies(came)) == list(range(-300, 300))
    assert all(arrival.waited is (arrival.body < 0) for arrival in came)


def test_a_full_batch_goes_out(connection: Any) -> None:
    producer = Producer(connection)
    with producer.batch(max_size=10):
        for number in range(25):
            send(producer, number)
        assert depth(connection, "orders") == 20
    assert depth(connection, "orders") == 25


def test_an_error_discards_what_is_held_back(connection: Any) -> None:
    producer = Producer(connection)

    def fail_underway() -> None:
        with producer.batch(max_size=10):
            for number in range(15):
                send(producer, number)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_underway()
    assert depth(connection, "orders") == 10
    send(producer, "alone")
    wait_until(lambda: depth(connection, "orders") == 11)


def test_what_cannot_wait_is_refused_at_once(connection: Any) -> None:
    producer = Producer(connection)
    with producer.batch():
        send(producer, "first")
        with pytest.raises(DelayTooLong):
            send(producer, "too long", delay=3600)
        with pytest.raises(CannotDelay):
            send(producer, "copied", delay=1, headers={"CC": ["other"]})
        send(producer, "last")
    assert depth(connection, "orders") == 2


def test_what_the_broker_refuses_is_named(connection: Any) -> None:
    """The others are sent, and the user's channel goes on."""
    producer = Producer(connection)
    channel = connection.default_channel

    def send_four() -> None:
        with producer.batch():
            send(producer, "first")
            send(producer, "gone", exchange="nowhere")
            send(producer, "unroutable", routing_key="nobody", mandatory=True)
            send(producer, "last")

    with pytest.raises(PublishRefused, match="2 message") as refused:
        send_four()
    reasons = {message.routing_key: message.reason for message in refused.value.refused}
    assert "no exchange 'nowhere'" in reasons["orders"]
    assert "NO_ROUTE" in reasons["nobody"] or "leads nowhere" in reasons["nobody"]
    assert connection.default_channel is channel
    # A channel that the broker closes takes confirms along: what was sent with it may be doubled.
    assert depth(connection, "orders") >= 2


def test_a_lost_connection_names_all_that_is_in_doubt(connection: Any) -> None:
    producer = Producer(connection)

    def lose_it_underway() -> None:
        with producer.batch():
            for number in range(5):
                send(producer, number)
            connection.connection.transport.sock.close()

    with pytest.raises(PublishRefused, match="in doubt") as refused:
        lose_it_underway()
    assert len(refused.value.refused) == 5


def test_without_the_option_kombu_publishes_at_once(vhost_url: str) -> None:
    with Connection(vhost_url) as connection:
        declare_queue(connection, "orders")
        producer = Producer(connection)
        assert not producer.supports_batch_publish
        with producer.batch():
            send(producer, "now")
            # Its connection confirms nothing: a synchronous method comes after it.
            declare_exchange(connection, "any", "direct")
            assert depth(connection, "orders") == 1
