"""The promoter's loop: it goes on after lost connections, scripts and servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_native_delay.testing import PrivateRedis, private_redis, require_redis
from celery_native_delay.testing.redis import ServerName
from celery_native_delay.transports.redis import promoter as module
from celery_native_delay.transports.redis.keys import Destination, entry_of
from celery_native_delay.transports.redis.promoter import RedisPromoter
from pytest_celery_native_delay import installed
from tests.brokers import self_signed_certificate
from tests.integration.redis_traffic import connector, delaying, promoting, store_of
from tests.sentinel import PrivateSentinel, private_sentinel
from tests.traffic import inbox, publish
from tests.waiting import wait_until


def blocked_clients(server: PrivateRedis) -> int:
    """The number of promoters that block on the wake-up marker."""
    return int(server.client.info("clients")["blocked_clients"])


def test_a_promoter_finds_messages_without_a_wake_up_marker(
    empty_redis: PrivateRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promoter that took the marker has died; others look after their longest sleep at latest."""
    monkeypatch.setattr(module, "LONGEST_SLEEP_SECONDS", 0.5)
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


# ---- Sentinel and TLS --------------------------------------------------------------------------


@pytest.fixture
def sentinel(server_name: ServerName) -> Iterator[PrivateSentinel]:
    with private_sentinel(server=server_name) as running:
        yield running


@pytest.mark.ci
def test_messages_wait_through_a_failover(sentinel: PrivateSentinel) -> None:
    master = {"master_name": sentinel.master_name}
    with promoting(connector(sentinel.url, **master)) as promoter:
        with delaying(sentinel.url, transport_options=master) as connection:
            publish(connection, "before", "jobs", delay=1)
            wait_until(lambda: promoter.promoted == 1)
            for number in range(20):
                publish(connection, number, "jobs", delay=5)
            # Replication is asynchronous, and WAIT waits for what this client has written.
            store_of(connection).client.set("written", 1)
            assert store_of(connection).client.wait(1, 10_000) == 1
        sentinel.failover()
        wait_until(lambda: promoter.promoted == 21)
        assert sentinel.master.client.llen("jobs") == 21
        with delaying(sentinel.url, transport_options=master) as connection:
            publish(connection, "after", "jobs", delay=3)
            wait_until(lambda: promoter.promoted == 22)


def test_over_tls_an_earlier_arrival_wakes_the_promoter_up_and_it_stops_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps for a message due in an hour when a nearer one is published, and at its stop.

    On Redis only: the Valkey of the wheel has no TLS.
    """
    monkeypatch.setattr(module, "LONGEST_SLEEP_SECONDS", 3600)
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
