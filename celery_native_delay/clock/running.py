"""Moves the test clock to each due time, and runs the due tasks."""

from __future__ import annotations

from collections.abc import Callable

from .. import now
from ..errors import NativeDelayError
from .inline_worker import InlineWorker

#: The largest number of tasks that run while the clock stands still. If more tasks are due, a task
#: probably sends itself again without a delay.
MOST_AT_ONE_MOMENT = 10_000

#: The largest number of clock moves per permitted task: a task waits again if its key is locked.
MOVES_PER_TASK = 100


class StillWaiting(NativeDelayError):
    """The largest permitted number of tasks has run, and another task still waits."""


class Running:
    """Moves the test clock to each due time, and lets the worker run tasks."""

    def __init__(
        self, worker: InlineWorker, move: Callable[[int], None], after_step: Callable[[], None]
    ) -> None:
        self._worker = worker
        self._move = move
        self._after_step = after_step
        #: The number of tasks that the worker had started when this object began to count tasks.
        self._before = 0

    def run_until(self, until_us: int) -> None:
        """Run all tasks due by *until_us* (epoch microseconds); then set the clock to that time."""
        self._before = self._worker.pool.started
        while (next_us := self._run_ready(MOST_AT_ONE_MOMENT)) is not None and next_us <= until_us:
            if next_us > now.time_ns() // 1000:
                self._before = self._worker.pool.started
            self._go_on(next_us)
        self._move(until_us)

    def run_all(self, limit: int) -> int:
        """Run tasks until no task is waiting; raise StillWaiting after *limit* tasks."""
        self._before = self._worker.pool.started
        moves = 0
        while (next_us := self._run_ready(limit)) is not None:
            self._check(limit)
            moves += 1
            if moves > MOVES_PER_TASK * limit:
                raise StillWaiting("expected the waiting tasks to run; the log says why they wait")
            self._go_on(next_us)
        return self._worker.pool.started - self._before

    def _run_ready(self, most: int) -> int | None:
        """Run up to *most* queued tasks; return a message's or timer's next due time, or None."""
        while self._worker.step():
            self._after_step()
            if self._worker.has_messages():
                self._check(most)
        times = (self._worker.promoter.next_due_us(), self._worker.timer.next_us())
        return min((us for us in times if us is not None), default=None)

    def _go_on(self, next_us: int) -> None:
        """Move the clock forward to *next_us*, and deliver the due messages."""
        if next_us > now.time_ns() // 1000:
            self._move(next_us)
        self._worker.deliver_due()

    def _check(self, most: int) -> None:
        ran = self._worker.pool.started - self._before
        if ran >= most:
            raise StillWaiting(
                f"{ran} tasks ran, and another one waits: schedules, and a task that sends itself, "
                f"never end; use advance(), or a higher limit"
            )
