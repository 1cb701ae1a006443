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
BEGUN = Record(OPEN, NOW, deadline=NOW + 60, jobs={"j": True})
DONE = Record(COMMITTED, NOW + 9, winners={"0": "1-b"}, by="the driver")


@pytest.fixture
def store(empty_redis: PrivateRedis) -> Iterator[FenceStore]:
    with fence_store(empty_redis.url) as store:
        yield store


def test_a_run_is_sealed_once(store: FenceStore, empty_redis: PrivateRedis) -> None:
    """By whoever comes first; its record lives as long as it was told to."""
    assert store.load(["r/1:é", "other"]) == [None, None]
    assert store.open("r/1:é", BEGUN, ttl_seconds=1000, job="j") == BEGUN
    assert store.load(["other", "r/1:é"]) == [None, BEGUN]
    done = replace(DONE, jobs=BEGUN.jobs)
    assert store.seal("r/1:é", DONE, ttl_seconds=500) == done
    (key,) = empty_redis.client.keys("*")
    assert 490 <= empty_redis.client.ttl(key) <= 500
    for late in (Record(ABORTED, NOW + 10), Record(ALL, NOW + 10), DONE):
        assert store.seal("r/1:é", late, ttl_seconds=5) == done
    assert store.open("r/1:é", BEGUN, ttl_seconds=5, job="k") == done
    assert store.load(["r/1:é"]) == [done]
    assert empty_redis.client.ttl(key) >= 490


def test_opening_again_puts_the_deadline_off(store: FenceStore) -> None:
    """Executors do, whose clocks differ; when the run began stays."""
    store.open("r", BEGUN, ttl_seconds=100, job="j")
    later = Record(OPEN, NOW + 5, deadline=NOW + 65)
    for record in (later, BEGUN):
        opened = store.open("r", record, ttl_seconds=100, job="j")
        assert opened == replace(BEGUN, deadline=NOW + 65)


def test_an_aborted_run_is_opened_again_by_another_job(store: FenceStore) -> None:
    """Workers may have dropped what those that had opened it have sent."""
    begun = Record(OPEN, NOW, deadline=NOW + 60)
    store.open("r", begun, ttl_seconds=100, job="j")
    store.open("r", begun, ttl_seconds=100, job="k")
    aborted = store.seal("r", Record(ABORTED, NOW, by="worker"), ttl_seconds=100)
    for job in ("j", "k"):
        assert store.open("r", begun, ttl_seconds=100, job=job) == aborted
    assert store.open("r", begun, ttl_seconds=100, job="l") == replace(begun, jobs={"l": True})
    store.seal("lost", Record(ABORTED, NOW, by="worker"), ttl_seconds=100)
    assert store.open("lost", begun, ttl_seconds=100, job="j") == BEGUN


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
