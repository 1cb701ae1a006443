"""An exchange or queue that takes no messages does not delay messages for others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from kombu import Connection

from celery_native_delay.testing import PrivateRabbitMQ, vhost_name
from celery_native_delay.transports.rabbitmq.inspection import verify
from celery_native_delay.transports.rabbitmq.management import management_of
from celery_native_delay.transports.rabbitmq.parking import rescue
from tests.brokers import in_turn
from tests.integration.traffic import (
    SETTINGS,
    TOPOLOGY,
    Arrival,
    Inbox,
    assert_nothing_held,
    bind,
    bodies,
    declare_exchange,
    declare_queue,
    delaying,
    delays_of,
    depth,
    held,
    inbox,
    parked_count,
)
from tests.traffic import publish
from tests.waiting import wait_until

FLOOD = range(100)
"""More than the 32 messages that dead-lettering has in flight: enough to stop a level for all."""

DELAY_SECONDS = 63 * SETTINGS["resolution"]
"""Through all levels but the two highest."""


def assert_none_early(arrivals: list[Arrival]) -> None:
    assert [arrival.body for arrival in arrivals if arrival.lateness_seconds < 0] == []


def send_others(connection: Any, letters: Inbox, numbers: range) -> None:
    """Send delayed messages to another queue, which *letters* consumes."""
    for number in numbers:
        publish(connection, f"other {number}", "others", delay=DELAY_SECONDS)
        letters.receive_until(lambda: True)


def flood_beside_others(connection: Any, routing_key: str, *, exchange: str = "") -> None:
    """Send FLOOD delayed messages to a destination that takes none.

    Fails unless other messages, sent before, between and after them, arrive on time.
    """
    url = connection.as_uri(include_password=True)
    declare_queue(connection, "others")
    delays_of(connection).prepare()
    with inbox(url, "others") as letters:
        for number in FLOOD:
            if number % 10 == 0:
                send_others(connection, letters, range(number, number + 1))
            publish(connection, number, routing_key, exchange=exchange, delay=DELAY_SECONDS)
        assert letters.receive_until(lambda: len(letters.arrivals) >= 10)
        assert letters.receive_until(lambda: levels_are_empty(letters.connection))
        send_others(connection, letters, range(100, 110))
        assert_none_early(letters.wait_for(20))


def levels_are_empty(connection: Any) -> bool:
    return all(depth(connection, hop.queue) == 0 for hop in TOPOLOGY.level_queues)


def held_in(rabbitmq: PrivateRabbitMQ, vhost: str, queue: str) -> int:
    """Messages in *queue*, including those being dead-lettered from it."""
    counts = held(rabbitmq, vhost).get(queue) or {}
    return int(counts.get("messages_ready", 0) + counts.get("messages_dlx", 0))


def assert_each_once(letters: Inbox) -> None:
    letters.receive_until(lambda: len(letters.arrivals) >= len(FLOOD))
    assert Counter(bodies(letters.arrivals)) == Counter(FLOOD)


def assert_all_come_once(rabbitmq: PrivateRabbitMQ, url: str, queue: str) -> None:
    """And none is left to come."""
    with inbox(url, queue) as letters:
        assert_each_once(letters)
        assert_nothing_held(rabbitmq, vhost_name(url))
        assert_each_once(letters)


@in_turn("kind", ("headers",), ("fanout",))
def test_an_exchange_without_bindings_keeps_only_its_own_messages(
    mortal_rabbitmq: PrivateRabbitMQ, mortal_url: str, kind: str
) -> None:
    vhost = vhost_name(mortal_url)
    with delaying(mortal_url) as connection:
        declare_exchange(connection, "news", kind)
        flood_beside_others(connection, "", exchange="news")
        assert parked_count(connection) == 0
        landing = TOPOLOGY.landing_queue("news")
        wait_until(lambda: held_in(mortal_rabbitmq, vhost, landing) == len(FLOOD))
    with Connection(mortal_url) as stranger:
        declare_queue(stranger, "readers")
        bind(stranger, "readers", "news")
    assert_all_come_once(mortal_rabbitmq, mortal_url, "readers")


@pytest.mark.ci
@in_turn("queue_type, exchange", ("classic", ""), ("quorum", "shop"))
def test_a_full_rejecting_queue_delays_only_its_own_messages(
    mortal_rabbitmq: PrivateRabbitMQ, mortal_url: str, queue_type: str, exchange: str
) -> None:
    """Published to by queue name, or through an exchange that another queue is bound to."""
    with delaying(mortal_url) as connection:
        full = {"x-queue-type": queue_type, "x-max-length": 1, "x-overflow": "reject-publish"}
        declare_queue(connection, "full", **full)
        if exchange:
            declare_exchange(connection, exchange, "topic")
            declare_queue(connection, "roomy")
            bind(connection, "full", exchange, "#")
            bind(connection, "roomy", exchange, "#")
        flood_beside_others(connection, "full", exchange=exchange)
        assert parked_count(connection) == 0
        if exchange:
            with inbox(mortal_url, "roomy") as letters:
                assert_each_once(letters)
        assert 1 <= depth(connection, "full") < len(FLOOD)
    assert_all_come_once(mortal_rabbitmq, mortal_url, "full")


@pytest.mark.ci
@in_turn("known_by", ("a worker",), ("the setting",))
def test_a_queue_that_rejects_by_policy_delays_only_its_own_messages(
    mortal_rabbitmq: PrivateRabbitMQ, mortal_url: str, known_by: str
) -> None:
    """AMQP does not show policies: a worker asks the management API, or the setting tells."""
    vhost = vhost_name(mortal_url)
    full = {"max-length": 1, "overflow": "reject-publish"}
    mortal_rabbitmq.set_policy(vhost, "cap", "^full$", full)
    settings: dict[str, Any] = {"management_url": mortal_rabbitmq.management_url}
    if known_by == "the setting":
        settings = {"landing": ["fu*"]}
    with delaying(mortal_url, **settings) as connection:
        declare_queue(connection, "full")
        delays_of(connection).prepare()
        if known_by == "a worker":
            assert_a_worker_finds_the_full_queue(connection)
        with delaying(mortal_url) as later:
            # This process knows neither the policy nor the setting, and binds nothing back.
            declare_queue(later, "full")
            delays_of(later).prepare()
        flood_beside_others(connection, "full")
        assert parked_count(connection) == 0
        assert 1 <= depth(connection, "full") < len(FLOOD)
    assert_all_come_once(mortal_rabbitmq, mortal_url, "full")


def assert_a_worker_finds_the_full_queue(connection: Any) -> None:
    """``delay doctor`` names the queue until a worker has put a landing queue in front of it."""
    delays = delays_of(connection)
    api = management_of(connection, delays.settings)

    def named() -> list[str]:
        return [each.problem for each in verify(delays, api) if each.check == "full queues"]

    [problem] = wait_until(lambda: named() or None)
    reason = "queue 'full' may refuse messages, and policy 'cap' sets overflow: reject-publish"
    assert reason in problem
    part = connection.default_channel.worker_part(delays.settings)
    [told] = part.watch_queues()
    assert f"{reason}: from now on its due messages go through" in told
    assert named() == part.watch_queues() == []


def test_messages_for_a_deleted_queue_are_parked_while_others_are_on_time(
    rabbitmq: PrivateRabbitMQ, vhost_url: str
) -> None:
    with delaying(vhost_url) as connection:
        declare_queue(connection, "gone")
        delays_of(connection).prepare()
        connection.default_channel.queue_delete("gone")
        flood_beside_others(connection, "gone")
        wait_until(lambda: parked_count(connection) == len(FLOOD))
        declare_queue(connection, "gone")
        outcome = rescue(delays_of(connection))
        assert outcome is not None
        assert (outcome.delivered, outcome.still_parked) == (len(FLOOD), 0)
    assert_all_come_once(rabbitmq, vhost_url, "gone")


def test_two_settings_of_one_namespace_deliver_side_by_side(vhost_url: str) -> None:
    """The two share one parking queue."""
    with delaying(vhost_url, levels=8) as old, delaying(vhost_url, levels=9) as new:
        for name, connection in (("old", old), ("new", new)):
            declare_queue(connection, "orders")
            publish(connection, name, "orders", delay=2)
            publish(connection, f"{name} astray", "nowhere", delay=2)
        with inbox(vhost_url, "orders", levels=9) as letters:
            came = letters.wait_for(2)
        assert sorted(bodies(came)) == ["new", "old"]
        assert_none_early(came)
        wait_until(lambda: parked_count(new) == 2)
        declare_queue(new, "nowhere")
        outcome = rescue(delays_of(new))
        assert outcome is not None
        assert outcome.delivered == 2
