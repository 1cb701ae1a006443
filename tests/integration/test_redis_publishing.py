"""Delayed publishing on Redis with kombu, and the promoter's loop."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import time_ns
from typing import Any

import pytest
from kombu import Connection, Queue
from kombu.transport import redis as kombu_redis

from celery_native_delay import UnsupportedBroker, redis_server
from celery_native_delay.redis_server import Server
from celery_native_delay.testing import PrivateRedis, private_redis, require_redis
from celery_native_delay.transports.redis import delays as module
from celery_native_delay.transports.redis import promoter as promoters
from celery_native_delay.transports.redis.keys import Destination, entry_of
from celery_native_delay.transports.redis.promoter import RedisPromoter
from pytest_celery_native_delay import installed
from tests.brokers import self_signed_certificate
from tests.integration.redis_traffic import connector, delaying, delays_of, promoting, store_of
from tests.traffic import QUEUES, eta_in, inbox, publish
from tests.waiting import wait_until

kombu_57 = pytest.mark.skipif(
    not hasattr(kombu_redis, "PublishBatch"), reason="kombu 5.7 brought x-expires and batches"
)


def promote_all(connection: Any) -> int:
    """Make all waiting messages due, and hand them over; their number."""
    store = store_of(connection)
    for member in store.client.zrange(store.keys.due, 0, -1):
        store.client.zadd(store.keys.due, {member: 0})
    return store.promote().delivered


def test_a_requeued_message_does_not_wait_again(empty_redis: PrivateRedis) -> None:
    with delaying(empty_redis.url) as connection:
        channel = connection.default_channel
        publish(connection, "hello", "jobs", delay=60)
        promote_all(connection)
        message = channel.basic_get("jobs")
        assert message.headers["eta"] > datetime.now(UTC).isoformat()
        message.requeue()
        again = channel.basic_get("jobs", no_ack=True)
        assert again.native_delay == message.native_delay, "and still tells of its wait"
        assert again.headers["redelivered"] is True
        assert store_of(connection).census().waiting == 0


@kombu_57
def test_a_delayed_message_extends_the_ttl_of_its_queue(empty_redis: PrivateRedis) -> None:
    queue = Queue("short", expires=50)
    with delaying(empty_redis.url) as connection:
        queue(connection.default_channel).declare()
        publish(connection, "hello", "short", delay=60, priority=9)
        promote_all(connection)
        (key,) = empty_redis.client.keys("short*")
        assert 40_000 < empty_redis.client.pttl(key) <= 50_000


@kombu_57
@pytest.mark.parametrize("prefix", ["", "pfx:", "{queue}:"])
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


@pytest.mark.parametrize(
    "server", [Server(version=(6, 0, 16)), Server(cluster=True, version=(7, 0, 15))]
)
def test_a_server_that_cannot_hold_messages_is_refused_on_every_publish(
    empty_redis: PrivateRedis, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    with delaying(empty_redis.url) as connection:
        monkeypatch.setattr(module, "server_of", lambda client: server)
        for _ in range(2):
            with pytest.raises(UnsupportedBroker):
                publish(connection, "hello", "jobs", delay=60)
        assert empty_redis.client.keys() == []


def test_a_message_put_back_waits_by_the_servers_clock(
    empty_redis: PrivateRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our clock is 20 s slow: the server delivered the message 10 s before its ETA by our clock."""
    with delaying(empty_redis.url) as connection:
        delays, store = delays_of(connection), store_of(connection)
        assert abs(delays.clock_ahead_seconds()) < 1
        publish(connection, "hello", "jobs", delay=60, headers={"id": "1"})
        promote_all(connection)
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


def blocked_clients(server: PrivateRedis) -> int:
    """The number of promoters that block on the wake-up marker."""
    return int(server.client.info("clients")["blocked_clients"])


def test_a_promoter_finds_messages_without_a_wake_up_marker(
    empty_redis: PrivateRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promoter that took the marker has died; others look after their longest sleep at latest."""
    monkeypatch.setattr(promoters, "LONGEST_SLEEP_SECONDS", 0.5)
    with (
        delaying(empty_redis.url) as connection,
        promoting(connector(empty_redis.url)),
        inbox(connection, "jobs") as received,
    ):
        wait_until(lambda: blocked_clients(empty_redis) == 1)
        store = store_of(connection)
        entry = entry_of(Destination(("other",)), "{}")
        store.client.hset(store.keys.messages, "unknown", entry)
        store.client.zadd(store.keys.due, {"unknown": store.now_us()})
        wait_until(lambda: store.census().waiting == 0)
        assert not received.arrivals


def test_a_message_that_its_destination_refuses_is_parked_and_logged(
    empty_redis: PrivateRedis, caplog: pytest.LogCaptureFixture
) -> None:
    empty_redis.client.set("poison", "no list")
    with delaying(empty_redis.url) as connection, promoting(connector(empty_redis.url)) as promoter:
        publish(connection, "bad", "poison", delay=0.2)
        publish(connection, "good", "jobs", delay=0.3)
        wait_until(lambda: promoter.promoted == 1)
        assert promoter.parked == 1
    assert "parked 1 message(s) that their queue has refused: WRONGTYPE" in caplog.text


def test_promoting_goes_on_after_the_server_was_killed(own_redis: PrivateRedis) -> None:
    """The server writes its append-only file before every answer, so SIGKILL loses nothing."""
    own_redis.client.config_set("appendfsync", "always")
    with promoting(connector(own_redis.url)) as promoter:
        with delaying(own_redis.url) as connection:
            for number in range(20):
                publish(connection, number, "jobs", delay=2)
        own_redis.kill()
        own_redis.start()
        wait_until(lambda: promoter.promoted == 20)
    assert own_redis.client.llen("jobs") == 20


def test_over_tls_an_earlier_arrival_wakes_the_promoter_up_and_it_stops_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps for a message due in an hour when a nearer one is published, and at its stop.

    On Redis only: the Valkey of the wheel has no TLS.
    """
    monkeypatch.setattr(promoters, "LONGEST_SLEEP_SECONDS", 3600)
    installed(require_redis, "redis")
    with private_redis(server="redis", tls=self_signed_certificate(tmp_path)) as server:
        assert server.url.startswith("rediss://")
        with (
            promoting(connector(server.url)),
            delaying(server.url) as connection,
            inbox(connection, "jobs") as received,
        ):
            publish(connection, "far", "jobs", delay=3600)
            wait_until(lambda: blocked_clients(server) == 1)
            publish(connection, "near", "jobs", delay=0.5)
            assert received.wait_for(1)[0].body == "near"
            wait_until(lambda: blocked_clients(server) == 1)


def test_a_promoter_logs_why_it_cannot_connect_and_retries(
    empty_redis: PrivateRedis, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(**_: Any) -> Any:
        raise ConnectionRefusedError("nobody there")

    promoter = RedisPromoter(refusing)
    with promoting(refusing):
        wait_until(lambda: "nobody there" in caplog.text)
    assert "promoting stopped, next attempt in 0.1 s: ConnectionRefusedError" in caplog.text
    promoter.stop()
    promoter.run()
