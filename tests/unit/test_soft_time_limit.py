"""A task's soft time limit passes through this package's code, which a task may be running."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from redis import ConnectionPool

import celery_native_delay
from celery_native_delay import RetryAfter, install
from celery_native_delay.app import keyed, retrying
from celery_native_delay.records.redis_link import RedisLink
from celery_native_delay.transports import status
from celery_native_delay.worker.leases import Leases


def interrupted(*_: Any, **__: Any) -> Any:
    raise SoftTimeLimitExceeded


class Interrupted(SimpleNamespace):
    """A connection during whose first use the time limit is over."""

    def __getattr__(self, name: str) -> Any:
        return interrupted


def redis_link() -> RedisLink:
    return RedisLink(ConnectionPool(), "the records", timeout_seconds=1)


def connect() -> None:
    link = redis_link()
    link._pool = SimpleNamespace(connection_class=interrupted, connection_kwargs={})
    link.run("return 1", ())


def hold() -> None:
    app = SimpleNamespace(pool=SimpleNamespace(), connection_for_write=interrupted)
    retrying._hold(app, "t", None, 1, {})  # type: ignore[arg-type]


def revoke() -> None:
    backend = SimpleNamespace(get_state=interrupted)
    keyed.revoke_result(SimpleNamespace(tasks={}, backend=backend), "1", "t", reason="revoked")


def look() -> None:
    status.warn_if_nothing_promotes("unit-soft-limit", interrupted)


def settle() -> None:
    leases = Leases(SimpleNamespace(connection_for_write=interrupted))
    leases._work = lambda: None  # type: ignore[method-assign]
    try:
        leases.settle("key", interrupted)
    finally:
        assert leases._unwritten  # the key is freed later


@pytest.mark.parametrize("call", [connect, hold, revoke, look, settle])
def test_the_soft_time_limit_passes_through(call: Callable[[], Any]) -> None:
    with pytest.raises(SoftTimeLimitExceeded):
        call()


def test_the_soft_time_limit_in_the_function_of_a_key_passes_through() -> None:
    app = install(
        Celery("soft", broker="memory://", set_as_current=False),
        rates={"soft.limited": celery_native_delay.Rate("1/s", key=interrupted)},
    )

    @app.task(name="soft.limited", shared=False, bind=True)
    def limited(self: Any) -> None:
        raise RetryAfter(1)

    limited.push_request(id="1", called_directly=False, headers={})
    with pytest.raises(SoftTimeLimitExceeded):
        limited.run()
