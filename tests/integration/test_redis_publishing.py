"""Delayed publishing on Redis with kombu."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from time import time_ns
from typing import Any

import pytest
from kombu import Connection, Queue
from kombu.transport import redis as kombu_redis

from celery_native_delay import UnsupportedBroker, redis_server
from celery_native_delay.message import HEADER
from celery_native_delay.redis_server import Server
from celery_native_delay.testing import PrivateRedis
from celery_native_delay.transports.redis import delays as module
from celery_native_delay.transports.redis.keys import Destination
from tests.integration.redis_traffic import (
    connector,
    delaying,
    delays_of,
    entries,
    promoting,
    store_of,
)
from tests.traffic import DIRECT, QUEUES, TOPIC, eta_in, inbox, publish
from tests.waiting import wait_until

WITH_BATCH = hasattr(kombu_redis, "PublishBatch")  # kombu 5.7


def promote_all(connection: Any) -> int:
    """Hand over all due messages; their number."""
    return store_of(connection).promote().delivered


def make_due(connection: Any) -> None:
    """Make all waiting messages due."""
    store = store_of(connection)
    for member in store.client.zrange(store.keys.due, 0, -1):
        store.client.zadd(store.keys.due, {member: 0})


def lists(server: PrivateRedis) -> dict[str, list[Any]]:
    """All lists on the server, with decoded messages, without ids and ETAs."""
    found = {}
    for key in server.client.scan_iter():
        if server.client.type(key) == b"list":
            envelopes = [json.loads(raw) for raw in server.client.lrange(key, 0, -1)]
            for envelope in envelopes:
                envelope["properties"].pop("delivery_tag")
                envelope["headers"].pop("eta", None)
                envelope["headers"].pop(HEADER, None)
            found[key.decode()] = envelopes
    return found


# ---- destination and content -------------------------------------------------------------------

ROUTES: dict[str, dict[str, Any]] = {
    "default exchange": {"routing_key": "default"},
    "a queue nobody declared": {"routing_key": "nobody"},
    "topic": {"exchange": TOPIC, "routing_key": "orders.today.late"},
    "topic, two queues": {"exchange": TOPIC, "routing_key": "orders.urgent"},
    "topic, no queue": {"exchange": TOPIC, "routing_key": "parcels"},
    "direct, two queues": {"exchange": DIRECT, "routing_key": "invoice"},
}


@pytest.mark.parametrize(
    ("route", "priority", "prefix"),
    [*zip(ROUTES, [None, 0, 3, 5, 6, 9], ["", "pfx:", "{queue}:"] * 2, strict=True)],
)
def test_a_delayed_message_goes_to_the_lists_of_the_immediate_one(
    empty_redis: PrivateRedis, route: str, priority: int | None, prefix: str
) -> None:
    found = []
    for delayed in (False, True):
        empty_redis.client.flushall()
        options = {"global_keyprefix": prefix} if prefix else {}
        with delaying(empty_redis.url, transport_options=options) as connection:
            for queue in QUEUES:
                queue(connection.default_channel).declare()
            body = {"text": "äöü", "empty": [], "big": 12345678901234567}
            headers = {"id": "task-1", "customer": {"n": 1.0}}
            connection.Producer().publish(
                body,
                headers=headers | ({"eta": eta_in(60)} if delayed else {}),
                priority=priority,
                correlation_id="c-1",
                **ROUTES[route],
            )
            if delayed:
                assert lists(empty_redis) == {}
                make_due(connection)
                promote_all(connection)
                assert entries(store_of(connection)) == 0
            found.append(lists(empty_redis))
    assert found[0] == found[1]


def test_a_requeued_message_does_not_wait_again(empty_redis: PrivateRedis) -> None:
    with delaying(empty_redis.url) as connection:
        channel = connection.default_channel
        publish(connection, "hello", "jobs", delay=60)
        make_due(connection)
        promote_all(connection)
        message = channel.basic_get("jobs")
        assert message.headers["eta"] > datetime.now(UTC).isoformat()
        message.requeue()
        again = channel.basic_get("jobs", no_ack=True)
        assert again.native_delay == message.native_delay, "and still tells of its wait"
        assert again.headers["redelivered"] is True
        assert store_of(connection).census().waiting == 0


# ---- kombu's own options -----------------------------------------------------------------------


def test_a_delayed_message_extends_the_ttl_of_its_queue(empty_redis: PrivateRedis) -> None:
    if not WITH_BATCH:
        pytest.skip("kombu 5.7 brought x-expires to Redis")
    queue = Queue("short", expires=50)
    with delaying(empty_redis.url) as connection:
        queue(connection.default_channel).declare()
        publish(connection, "hello", "short", delay=60, priority=9)
        make_due(connection)
        promote_all(connection)
        (key,) = empty_redis.client.keys("short*")
        assert 40_000 < empty_redis.client.pttl(key) <= 50_000


@pytest.mark.skipif(not WITH_BATCH, reason="kombu 5.7 brought batches")
@pytest.mark.parametrize("prefix", ["", "pfx:"])
def test_kombus_producer_batch_delays_messages_with_an_eta(
    empty_redis: PrivateRedis, prefix: str
) -> None:
    options = {"global_keyprefix": prefix} if prefix else {}
    with delaying(empty_redis.url, transport_options=options) as connection:
        producer = connection.Producer()
        with producer.batch():
            for number in range(10):
                producer.publish(number, routing_key="jobs")
                producer.publish(number, routing_key="jobs", headers={"eta": eta_in(60)})
            assert store_of(connection).census().waiting == 0, "sent with the batch"
        assert store_of(connection).census().waiting == 10
        assert empty_redis.client.llen(f"{prefix}jobs") == 10
        make_due(connection)
        assert promote_all(connection) == 10
        assert empty_redis.client.llen(f"{prefix}jobs") == 20


def test_over_a_unix_socket(empty_redis: PrivateRedis) -> None:
    with (
        promoting(connector(empty_redis.socket_url)),
        delaying(empty_redis.socket_url) as connection,
        inbox(connection, "jobs") as received,
    ):
        publish(connection, "hello", "jobs", delay=0.2)
        received.wait_for(1)


def test_databases_and_namespaces_are_separate(empty_redis: PrivateRedis) -> None:
    with (
        delaying(empty_redis.url) as zero,
        delaying(empty_redis.url[:-1] + "1") as one,
        delaying(empty_redis.url, namespace="other") as other,
    ):
        publish(zero, "hello", "jobs", delay=60)
        assert [store_of(each).census().waiting for each in (zero, one, other)] == [1, 0, 0]


# ---- refusals ----------------------------------------------------------------------------------


def assert_nothing_sent(server: PrivateRedis) -> None:
    assert server.client.keys() == []


@pytest.mark.parametrize(
    "server",
    [Server(version=(6, 0, 16)), Server(version=(7, 0, 15), cluster=True)],
    ids=["old", "cluster"],
)
def test_a_server_that_cannot_hold_messages_is_refused_on_every_publish(
    empty_redis: PrivateRedis, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    with delaying(empty_redis.url) as connection:
        monkeypatch.setattr(module, "server_of", lambda client: server)
        for _ in range(2):
            with pytest.raises(UnsupportedBroker):
                publish(connection, "hello", "jobs", delay=60)
        assert_nothing_sent(empty_redis)


def test_a_message_put_back_waits_by_the_servers_clock(
    empty_redis: PrivateRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our clock is 20 s slow: the server delivered the message 10 s before its ETA by our clock."""
    with delaying(empty_redis.url) as connection:
        delays, store = delays_of(connection), store_of(connection)
        assert abs(delays.clock_ahead_seconds()) < 1
        publish(connection, "hello", "jobs", delay=60, headers={"id": "1"})
        make_due(connection)
        store.promote()
        message = connection.default_channel.basic_get("jobs", no_ack=True)
        for each in (module, redis_server):
            monkeypatch.setattr(each, "time_ns", lambda: time_ns() - 20_000_000_000)
        assert delays.clock_ahead_seconds() == pytest.approx(20, abs=1)
        due_us = module.time_ns() // 1000 + 10_000_000
        delays.put_back(message._raw, Destination(("jobs",)), due_us=due_us)
        within_us = store.census().until_first_us
        assert within_us is not None
        assert 5_000_000 < within_us <= 10_001_000


def test_a_message_put_back_twice_waits_once(empty_redis: PrivateRedis) -> None:
    due = datetime.now(UTC) + timedelta(seconds=60)
    due_us = int(due.timestamp() * 1_000_000)
    with delaying(empty_redis.url) as connection, Connection(empty_redis.url) as plain:
        publish(plain, "hello", "jobs", headers={"id": "1", "eta": due.isoformat()}, priority=9)
        channel = connection.default_channel
        message = channel.basic_get("jobs")
        for _ in range(2):
            destination = channel.destination("jobs", message._raw)
            delays_of(connection).put_back(message._raw, destination, due_us=due_us)
        assert store_of(connection).census().waiting == 1
        message.ack()
        make_due(connection)
        promote_all(connection)
        again = channel.basic_get("jobs", no_ack=True)
        assert again.delivery_tag != message.delivery_tag, "acknowledging one is not the other"
        assert again.decode() == "hello"
        assert again.properties["priority"] == 9
        assert again.native_delay is not None


def test_a_channel_that_outlives_its_connection_closes_without_an_error(
    empty_redis: PrivateRedis,
) -> None:
    """An error there would end the worker. Others restore its unacknowledged messages."""
    options = {"visibility_timeout": 1, "unacked_restore_throttle": 1}
    with delaying(empty_redis.url, transport_options=options) as connection:
        channel = connection.default_channel
        publish(connection, "hello", "default", declare=QUEUES)
        assert channel.basic_get("default") is not None
        connection.transport.client = None  # as Connection.collect() leaves it
        channel.close()
    with delaying(empty_redis.url, transport_options=options) as connection:
        qos = connection.default_channel.qos

        def restored() -> Any:
            qos.restore_visible(interval=1)
            return connection.default_channel.basic_get("default", no_ack=True)

        wait_until(restored)
