"""Debounce and unique during a failover of Redis: a call is kept or lost as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from math import inf
from random import Random
from threading import Event
from time import monotonic
from typing import Any, NamedTuple

import pytest
from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from celery_native_delay import Delay, install
from celery_native_delay.testing import require_redis
from celery_native_delay.testing.redis import client_of
from pytest_celery_native_delay import installed
from tests.integration.redis_traffic import connector, promoting
from tests.sentinel import PrivateSentinel, private_sentinel
from tests.traffic import beside
from tests.waiting import wait_until

pytestmark = pytest.mark.ci

KEYS = ("a", "b", "c")
KINDS = ("debounce", "unique")

PRODUCERS = 3

#: Longer than the test takes.
LONG = 600.0


class Call(NamedTuple):
    """A call for *key*, and *stood*, the id that it returned.

    A failed call has no end and may have had its effect. *is_safe*: the replica has the call.
    """

    kind: str
    key: str
    id: str
    began: float
    ended: float = inf
    stood: str = ""
    is_safe: bool = False


@contextmanager
def producing(sentinel: PrivateSentinel) -> Iterator[Celery]:
    app = Celery("shop", broker=sentinel.url, set_as_current=False)
    app.conf.update(
        task_default_queue="jobs",
        task_ignore_result=True,
        broker_transport_options={"master_name": sentinel.master_name},
    )
    with install(app):
        yield app
        app.close()


def test_a_failover_loses_the_last_calls_as_a_whole_or_none() -> None:
    """One task waits for each key: that of the last call on the replica, or of a later call.

    If a unique task is on the replica, all calls before and after return its id.
    """
    calls: list[Call] = []
    numbers, stopping = count(), Event()

    def produce(seed: int) -> None:
        """Make calls until one fails."""
        random = Random(seed)
        with client_of(host="127.0.0.1", port=old_port) as probe, producing(sentinel) as app:
            delay = Delay(app)
            while not stopping.wait(0.005):
                kind, key = random.choice(KINDS), random.choice(KEYS)
                task_id = f"{kind}-{key}-{next(numbers)}"
                began = monotonic()
                try:
                    stood = call(app, delay, kind, key, task_id)
                except OperationalError:
                    calls.append(Call(kind, key, task_id, began))
                    return
                ended, is_safe = monotonic(), random.random() < 0.3 and arrived(probe)
                calls.append(Call(kind, key, task_id, began, ended, stood, is_safe))

    def many() -> bool:
        return all(
            sum((each.kind, each.key) == (kind, key) and each.is_safe for each in calls) >= 5
            for key in KEYS
            for kind in KINDS
        )

    installed(require_redis, "redis")
    with private_sentinel(server="redis") as sentinel:
        old_port = sentinel.master.port
        with ExitStack() as stack:
            for seed in range(PRODUCERS):
                stack.enter_context(beside(partial(produce, seed), stop=stopping.set))
            wait_until(many)
            sentinel.failover()
        with producing(sentinel) as app:
            delay = Delay(app)
            waiting = delay.ids()
            assert len(waiting) == len(KINDS) * len(KEYS)
            for key in KEYS:
                assert_the_last_debounced_task_waits(key, calls, waiting)
                stands = assert_one_unique_task_waits(key, calls, waiting)
                assert call(app, delay, "unique", key, "another") == stands
                last = f"last-{key}"
                assert call(app, delay, "debounce", key, last) == last
            waiting = delay.ids()
            assert len(waiting) == len(KINDS) * len(KEYS)
            run_all(sentinel, delay, waiting)


def call(app: Celery, delay: Delay, kind: str, key: str, task_id: str) -> str:
    """Make the call; the id of the task that now waits for the key."""
    signature = app.signature("shop.reindex", task_id=task_id)
    if kind == "debounce":
        return str(delay.debounce(signature, key=key, seconds=LONG).id)
    return str(delay.unique(signature, key=key, countdown=LONG).id)


def arrived(probe: Any) -> bool:
    """True if the replica has everything written so far."""
    try:
        probe.set("probe", "")
        return bool(probe.wait(1, 5_000))
    except RedisError:
        return False


def assert_the_last_debounced_task_waits(key: str, calls: list[Call], waiting: list[str]) -> None:
    mine = {call.id: call for call in calls if (call.kind, call.key) == ("debounce", key)}
    (stands,) = mine.keys() & {*waiting}
    last_safe = max(call.began for call in mine.values() if call.is_safe)
    assert mine[stands].ended >= last_safe, "a later call had been confirmed, and is lost"


def assert_one_unique_task_waits(key: str, calls: list[Call], waiting: list[str]) -> str:
    mine = [call for call in calls if (call.kind, call.key) == ("unique", key)]
    (stands,) = {call.id for call in mine} & {*waiting}
    assert {call.stood for call in mine if call.is_safe} == {stands}
    return stands


def run_all(sentinel: PrivateSentinel, delay: Delay, waiting: list[str]) -> None:
    """Run all waiting tasks now; each arrives once."""
    redis = sentinel.master.client
    with promoting(connector(sentinel.url, master_name=sentinel.master_name)):
        assert all(delay.run_now(each) for each in waiting)
        wait_until(lambda: redis.llen("jobs") >= len(waiting))
    came = [json.loads(text)["headers"]["id"] for text in redis.lrange("jobs", 0, -1)]
    assert sorted(came) == sorted(waiting)
