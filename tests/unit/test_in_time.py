"""A driver that hangs, whatever it waits for, cannot block the thread that consumes tasks."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from celery_native_delay.backoff import Backoff
from celery_native_delay.errors import StoreUnavailable
from celery_native_delay.within import MOST_AT_ONCE, Within
from celery_native_delay.worker import in_time as module
from celery_native_delay.worker.in_time import PATIENCE_SECONDS, in_time
from celery_native_delay.worker.leases import Leases
from tests.waiting import SLOWNESS, wait_until

#: The patience with each of three calls, and generous pauses of a busy machine.
MOST_SECONDS = 3 * PATIENCE_SECONDS + 10 * SLOWNESS


@pytest.fixture(autouse=True)
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """An event for which the calls of a test wait; the store is not known to hang."""
    monkeypatch.setattr(module, "_within", Within(PATIENCE_SECONDS))
    monkeypatch.setattr(module, "_backoff", Backoff(60, 60))
    monkeypatch.setattr(module, "_asked_again_at", 0.0)
    hangs = Event()
    yield hangs
    hangs.set()


def test_of_many_tasks_only_the_first_waits_for_a_driver_that_hangs(hangs: Event) -> None:
    began = monotonic()
    for _ in range(1000):
        with pytest.raises(StoreUnavailable):
            in_time(hangs.wait)
    assert monotonic() - began < MOST_SECONDS


def test_calls_that_never_return_hold_a_bounded_number_of_threads(
    hangs: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_backoff", Backoff(0, 0))
    for _ in range(MOST_AT_ONCE):
        with pytest.raises(StoreUnavailable, match="no answer within"):
            in_time(hangs.wait)
    with pytest.raises(StoreUnavailable, match="earlier calls have not returned"):
        in_time(hangs.wait)
    hangs.set()
    wait_until(lambda: in_time(lambda: True))


def test_keys_of_discarded_tasks_are_freed_later_if_the_store_hangs(
    hangs: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revoked, unknown or lost task frees its key in the thread that consumes tasks."""
    freed: list[str] = []

    def change(name: str, rule: Any) -> None:
        hangs.wait()
        freed.append(name)

    leases = Leases(SimpleNamespace())
    monkeypatch.setattr(leases, "_change", change)
    monkeypatch.setattr("celery_native_delay.worker.leases.RETRY_SECONDS", 0.05)
    began = monotonic()
    for number in range(100):
        leases.settle_in_time(str(number), lambda seen: seen)  # type: ignore[arg-type, return-value]
    assert monotonic() - began < MOST_SECONDS
    assert freed == []
    hangs.set()
    wait_until(lambda: {*freed} == {str(number) for number in range(100)})
