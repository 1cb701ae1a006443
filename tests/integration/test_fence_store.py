"""Records of fenced runs in a real Redis, and in a Valkey."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from time import monotonic

import pytest

from celery_native_delay import FenceUnavailable
from celery_native_delay.fence import FenceStore, fence_store
from celery_native_delay.fence.run import ABORTED, ALL, COMMITTED, OPEN, Record
from celery_native_delay.testing import PrivateRedis, private_redis

NOW = 1_795_200_000.25
BEGUN = Record(OPEN, NOW, deadline=NOW + 60)
DONE = Record(COMMITTED, NOW + 9, winners={"0": "1-b"}, by="the driver")


@pytest.fixture
def store(empty_redis: PrivateRedis) -> Iterator[FenceStore]:
    with fence_store(empty_redis.url) as store:
        yield store


def test_a_run_is_sealed_once(store: FenceStore, empty_redis: PrivateRedis) -> None:
    """By whoever comes first; its record lives as long as it was told to."""
    assert store.load(["r/1:é", "other"]) == [None, None]
    assert store.open("r/1:é", BEGUN, ttl_seconds=1000) == BEGUN
    assert store.load(["other", "r/1:é"]) == [None, BEGUN]
    assert store.seal("r/1:é", DONE, ttl_seconds=500) == DONE
    (key,) = empty_redis.client.keys("*")
    assert 490 <= empty_redis.client.ttl(key) <= 500
    for late in (Record(ABORTED, NOW + 10), Record(ALL, NOW + 10), DONE):
        assert store.seal("r/1:é", late, ttl_seconds=5) == DONE
    assert store.open("r/1:é", BEGUN, ttl_seconds=5, reopen=True) == DONE
    assert store.load(["r/1:é"]) == [DONE]
    assert empty_redis.client.ttl(key) >= 490


def test_opening_again_puts_the_deadline_off(store: FenceStore) -> None:
    """Executors do, whose clocks differ; when the run began stays."""
    store.open("r", BEGUN, ttl_seconds=100)
    later = Record(OPEN, NOW + 5, deadline=NOW + 65)
    assert store.open("r", later, ttl_seconds=100) == replace(BEGUN, deadline=NOW + 65)
    assert store.open("r", BEGUN, ttl_seconds=100) == replace(BEGUN, deadline=NOW + 65)


def test_an_aborted_run_is_opened_again_only_by_who_may(store: FenceStore) -> None:
    aborted = Record(ABORTED, NOW, by="worker")
    assert store.seal("r", aborted, ttl_seconds=100) == aborted
    assert store.open("r", BEGUN, ttl_seconds=100) == aborted
    assert store.open("r", BEGUN, ttl_seconds=100, reopen=True) == BEGUN


def test_what_does_not_serve_is_an_error_of_ours(empty_redis: PrivateRedis) -> None:
    empty_redis.client.lpush("native_delay_fence:r", "no record")
    with (
        fence_store(empty_redis.url) as store,
        pytest.raises(FenceUnavailable, match="WRONGTYPE"),
    ):
        store.seal("r", DONE, ttl_seconds=1)
    began = monotonic()
    with (
        fence_store("redis://127.0.0.1:1", patience_seconds=0.5) as store,
        pytest.raises(FenceUnavailable, match="does not serve: ConnectionError"),
    ):
        store.load(["r"])
    assert monotonic() - began >= 0.5
    with pytest.raises(FenceUnavailable, match=r"rediss://.*got 'amqp'"):
        fence_store("amqp://guest:secret@broker")


def test_a_socket_a_password_and_a_database(server_name: str) -> None:
    """As the URLs of Celery's brokers have them; a wrong password is told at once."""
    with private_redis(server=server_name, password="s3 cret") as server:  # type: ignore[arg-type]
        with fence_store(server.url) as store:
            store.seal("r", DONE, ttl_seconds=100)
        for url, record in (
            (server.socket_url, DONE),
            (f"{server.socket_url}?virtual_host=3", None),
        ):
            with fence_store(url) as store:
                assert store.load(["r"]) == [record]
        wrong = server.url.replace("cret", "cretive")
        with (
            fence_store(wrong, patience_seconds=3600) as store,
            pytest.raises(FenceUnavailable, match="AuthenticationError") as refused,
        ):
            store.load(["r"])
        assert "cretive" not in str(refused.value)
