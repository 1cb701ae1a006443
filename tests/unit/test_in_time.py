"""A store that hangs or answers too late: tasks are consumed on, and nothing stays locked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery

from celery_native_delay import StoreUnavailable, install
from celery_native_delay.backoff import Backoff
from celery_native_delay.keyed import rules
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
    leases = Leases(None)
    monkeypatch.setattr(leases, "_change", lambda name, _: hangs.wait() and freed.append(name))
    monkeypatch.setattr("celery_native_delay.worker.leases.RETRY_SECONDS", 0.05)
    began = monotonic()
    for number in range(100):
        leases.settle_in_time(str(number), lambda seen: seen)  # type: ignore[arg-type, return-value]
    assert monotonic() - began < MOST_SECONDS
    assert freed == []
    hangs.set()
    wait_until(lambda: {*freed} == {str(number) for number in range(100)})


# ---- late answers --------------------------------------------------------------------------------


def test_a_result_that_comes_too_late_is_undone_and_an_earlier_one_is_not() -> None:
    within, gate, undone = Within(0.05), Event(), list[str]()
    within_reach = Within(60)

    def answer(text: str) -> str:
        gate.wait()
        return text

    with pytest.raises(TimeoutError):
        within(partial(answer, "late"), undo=undone.append)
    gate.set()
    assert within_reach(partial(answer, "in time"), undo=undone.append) == "in time"
    wait_until(lambda: undone == ["late"])


def test_an_error_that_comes_too_late_ends_no_thread() -> None:
    within, gate, ended = Within(0.05), Event(), Event()

    def fail() -> None:
        gate.wait()
        ended.set()
        raise TimeoutError("the call's own")

    with pytest.raises(TimeoutError):
        within(fail)
    gate.set()
    ended.wait()
    wait_until(lambda: not within._idle.empty())
    with pytest.raises(TimeoutError, match="the call's own"):
        Within(60)(fail)


def test_a_lock_is_settled_while_the_change_of_another_one_hangs() -> None:
    gate, hangs, settled = Event(), Event(), list[str]()

    def change(name: str, rule: Any) -> tuple[None, None]:
        if name == "unique:shop.sync:1":
            hangs.set()
            gate.wait()
        settled.append(name)
        return None, None

    leases = Leases(None)
    leases._records = Mock(change=change)
    slow = Thread(target=leases.settle, args=("unique:shop.sync:1", rules.end), daemon=True)
    slow.start()
    hangs.wait()
    leases.settle("unique:shop.sync:2", rules.end)
    assert settled == ["unique:shop.sync:2"]
    gate.set()
    slow.join()


@pytest.mark.parametrize("rule", [rules.claim_once, rules.begin])
def test_a_lock_that_a_worker_takes_too_late_is_free_when_the_task_comes_again(
    rule: Callable[..., rules.Step], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_within", Within(0.05))
    monkeypatch.setattr(module, "_backoff", Backoff(0.05, 0.1))
    app = Celery("shop", broker="memory://", set_as_current=False)
    install(app, store=f"sqlite:///{tmp_path}/delays.db")
    monkeypatch.setattr(rules, "LEASE_US", 3_600_000_000)
    leases, gate, taken = Leases(app), Event(), Event()
    change = leases._change

    def late(*args: Any) -> Any:
        gate.wait()
        answer = change(*args)
        taken.set()
        return answer

    monkeypatch.setattr(leases, "_change", late)
    with pytest.raises(StoreUnavailable):
        leases.begin_in_time("once:shop.pay:1", "order-1", lambda: True, rule)
    gate.set()
    taken.wait()
    wait_until(lambda: leases.begin("once:shop.pay:1", "order-1", bool, rule)[1].free_us is None)
