"""The gates of a worker, one by one: the ruling of each on a received task."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from celery_native_delay.message import Delayed
from celery_native_delay.settings import DelaySettings
from celery_native_delay.transports.interface import Answer
from celery_native_delay.worker.arrival import (
    AWAY_US,
    Announce,
    Arrival,
    AskAgain,
    Drop,
    Ruling,
    WaitUntil,
)
from celery_native_delay.worker.gates import (
    Moved,
    cancelled,
    early,
    expired,
    gates,
)

NOW_US = 1_795_176_000_000_000
IN_A_MINUTE = "2026-11-20T12:01:00+00:00"
WAITED = Delayed("d-1", NOW_US, "", "celery")


def arrival(delayed: Delayed | None = None, **headers: Any) -> Arrival:
    message = SimpleNamespace(headers={"id": "1", "task": "t", **headers}, native_delay=delayed)
    return Arrival(message, message.headers, None, NOW_US)


class WaitingTasks:
    """Receipts that always give *answer*."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def may_run(self, headers: Mapping[str, Any], delayed: Delayed) -> Answer:
        return self.answer

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("answer", "records_away", "ruling"),
    [
        (Answer.RUN, "wait", None),
        (Answer.DROP, "wait", Drop("it was cancelled or rescheduled")),
        (Answer.AWAY, "wait", WaitUntil(NOW_US + AWAY_US, "d-1", AskAgain(5.0))),
        (Answer.AWAY, "run", None),
    ],
)
def test_the_gate_for_moved_tasks(answer: Answer, records_away: str, ruling: Ruling | None) -> None:
    moved = Moved(DelaySettings(records_away=records_away))
    moved.receipts = WaitingTasks(answer)
    assert moved(arrival(WAITED)) == ruling
    assert moved(arrival()) is None, "it did not wait"
    moved.receipts = None
    assert moved(arrival(WAITED)) is None, "there are no records"


def test_a_cancelled_task_does_not_wait_for_unreachable_records() -> None:
    """It would lose its mark "cancelled" if it were put back."""
    moved = Moved(DelaySettings(records_away="wait"))
    moved.receipts = WaitingTasks(Answer.AWAY)
    assert moved(arrival(WAITED._replace(cancelled=True))) is None


def test_a_cancelled_task_is_announced() -> None:
    assert cancelled(arrival(WAITED._replace(cancelled=True))) == Announce()
    assert cancelled(arrival(WAITED)) is None
    assert cancelled(arrival()) is None


@pytest.mark.parametrize(("late_ms", "drops"), [(0, False), (1, True)])
def test_an_expired_message_is_dropped(late_ms: int, drops: bool) -> None:
    over = WAITED._replace(expires_ms=NOW_US // 1000 - late_ms)
    assert expired(arrival(over)) == (Drop("it has expired", expired=True) if drops else None)
    assert expired(arrival(over, expires=IN_A_MINUTE)) is None, "Celery's own"
    assert expired(arrival(WAITED)) is None


def test_an_early_task_waits_in_the_broker() -> None:
    assert early(arrival(eta=IN_A_MINUTE)) == WaitUntil(NOW_US + 60_000_000)
    again = WaitUntil(NOW_US + 60_000_000, "d-1")
    assert early(arrival(WAITED, eta=IN_A_MINUTE)) == again, "a mark must find it when it is due"
    assert early(arrival()) is None
    assert early(arrival(WAITED._replace(cancelled=True), eta=IN_A_MINUTE)) is None


def test_the_order_of_the_gates() -> None:
    """A replaced copy is not announced. The records are not asked about an early task yet."""

    def fence(_: Arrival) -> None:
        return None

    moved = Moved(DelaySettings())
    assert gates(DelaySettings(), moved, None, fence) == (early, moved, cancelled, expired, fence)
    assert early not in gates(DelaySettings(adopt=False), moved, None, fence)
