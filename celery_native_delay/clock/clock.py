"""``Clock(app)``: a test clock that runs delayed tasks at their due times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, Self

from celery import Celery, current_app, signals
from celery.exceptions import NotRegistered
from celery.result import _set_task_join_will_block

from .. import now
from ..app.delay import Delay
from ..app.installation import checked_app, installed
from ..due_time import due_us
from ..errors import NativeDelayError
from ..records.waiting import Query, WaitingPage
from ..schedules.next_due import with_folds
from .inline_worker import InlineWorker
from .replacing import in_memory

#: The largest number of tasks that run while the clock stands still. If more tasks are due, a task
#: probably sends itself again without a delay.
MOST_AT_ONE_MOMENT = 10_000

#: The largest number of clock moves per permitted task: a task waits again if its key is locked.
MOVES_PER_TASK = 100


class StillWaiting(NativeDelayError):
    """The largest permitted number of tasks has run, and another task still waits."""


class Clock:
    """Runs an app's delayed tasks in a test, without a broker, a worker or real waiting.

    Within the ``with`` block, the app's messages are kept in memory and in a temporary SQLite file.
    The app's own broker is not used. Time stops until the test moves the clock. The due tasks run
    in the test's process, earliest due time first.

    With the extra ``testing`` (time-machine), ``time.time()`` and ``datetime.now()`` return the
    clock's time, too.

    Args:
        app: a Celery app with ``install(app)``. Defaults to Celery's current app.
        raises: if True, the test gets the exception of a failed task. If False, the exceptions are
            added to :attr:`errors`.
    """

    def __init__(self, app: Celery | None = None, *, raises: bool = True) -> None:
        self._app: Any = checked_app(current_app if app is None else app)
        self.raises = raises
        #: The exceptions of tasks that failed while *raises* was False.
        self.errors: list[BaseException] = []
        self._undo = ExitStack()
        self._worker: InlineWorker | None = None
        #: The number of tasks that the worker had started when it last began to count.
        self._before = 0
        self._traveller: Any = None

    def __enter__(self) -> Self:
        if now.stopped_at_ns is not None:
            raise RuntimeError("expected one clock at a time, got a clock within another clock")
        installation = installed(self._app)
        with ExitStack() as undo:
            undo.enter_context(self._stopped_time())
            undo.enter_context(in_memory(self._app, installation))
            signals.task_failure.connect(self._note_error, weak=False)
            undo.callback(signals.task_failure.disconnect, self._note_error)
            signals.task_unknown.connect(self._note_unknown, weak=False)
            undo.callback(signals.task_unknown.disconnect, self._note_unknown)
            worker = InlineWorker(self._app)
            undo.callback(worker.stop)
            self._worker = worker
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._worker = None
        self._undo.close()

    # --- what tests call -----------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The clock's current time, in UTC."""
        return now.utc_now()

    def advance(self, **duration: float) -> None:
        """Move the clock forward, and run each task that is due by the new time.

        Args:
            **duration: the arguments of ``timedelta``, such as ``days=3`` or ``hours=1``. Without
                arguments, only tasks that are already due run.

        Raises:
            ValueError: the duration is negative.
            StillWaiting: 10,000 tasks ran while the clock stood still, and another task is due.
        """
        self.advance_to(self.now + timedelta(**duration))

    def advance_to(self, moment: datetime) -> None:
        """Move the clock forward to *moment*, and run each task that is due by then.

        A *moment* without a time zone is in the app's time zone. Raises the same errors as
        :meth:`advance`.
        """
        if not isinstance(moment, datetime):
            raise TypeError(f"expected a datetime, got {moment!r}")
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=with_folds(self._app.timezone))
        until_us = due_us(moment)
        if until_us < now.time_ns() // 1000:
            raise ValueError(f"expected a time from {self.now.isoformat()} on, got {moment!r}")
        with self._as_worker() as worker:
            self._before = worker.started
            while (next_us := self._run_ready(worker, MOST_AT_ONE_MOMENT)) is not None:
                if next_us > until_us:
                    break
                if next_us > now.time_ns() // 1000:
                    self._before = worker.started
                self._go_on(worker, next_us)
            self._move(until_us)

    def run_all(self, limit: int = 1000) -> int:
        """Run all waiting tasks at their due times, and return the number of tasks that ran.

        Raises:
            StillWaiting: *limit* tasks ran, and another task is waiting.
        """
        with self._as_worker() as worker:
            self._before, moves = worker.started, 0
            while (next_us := self._run_ready(worker, limit)) is not None:
                self._check(worker, limit)
                moves += 1
                if moves > MOVES_PER_TASK * limit:
                    raise StillWaiting("expected waiting tasks to run; the log says why they wait")
                self._go_on(worker, next_us)
            return worker.started - self._before

    def due(self, search: str | Query = "", *, limit: int = 1000) -> WaitingPage:
        """Return up to *limit* waiting tasks that match *search*, earliest due time first."""
        return Delay(self._app).ls(search, limit=limit)

    # --- private -------------------------------------------------------------------------

    @contextmanager
    def _as_worker(self) -> Iterator[InlineWorker]:
        """Make ``result.get()`` inside a task raise an error, as in a worker."""
        if self._worker is None:
            raise RuntimeError("expected a clock in its with block: with Clock(app) as clock")
        self._worker.holding.look()
        _set_task_join_will_block(True)
        try:
            yield self._worker
        finally:
            _set_task_join_will_block(False)

    @contextmanager
    def _stopped_time(self) -> Iterator[None]:
        # To the millisecond: time-machine's times are floating-point numbers.
        start_us = now.time_ns() // 1_000_000 * 1000
        own = vars(self._app).get("now")
        with ExitStack() as undo:
            with suppress(ImportError):
                import time_machine

                travel = time_machine.travel(now.moment(start_us), tick=False)
                self._traveller = undo.enter_context(travel)
            undo.callback(now.stop_at, None)
            now.stop_at(start_us)
            self._app.now = lambda: now.utc_now().astimezone(self._app.timezone)
            try:
                yield
            finally:
                del self._app.now
                if own is not None:
                    self._app.now = own

    def _move(self, us: int) -> None:
        now.stop_at(us)
        if self._traveller is not None:
            self._traveller.move_to(now.moment(us))

    def _note_error(self, sender: Any = None, exception: Any = None, **_: Any) -> None:
        if sender.app is self._app:
            self.errors.append(exception)

    def _note_unknown(self, sender: Any = None, name: str = "", **_: Any) -> None:
        self._note_error(sender, NotRegistered(name))

    def _raise_error(self) -> None:
        if self.raises and self.errors:
            raise self.errors.pop(0)

    # --- the worker's steps --------------------------------------------------------------

    def _run_ready(self, worker: InlineWorker, most: int) -> int | None:
        """Run up to *most* queued tasks; return a message's or timer's next due time, or None."""
        while worker.step():
            self._raise_error()
            if worker.has_messages():
                self._check(worker, most)
        times = (worker.promoter.next_due_us(), worker.timer.next_us())
        return min((us for us in times if us is not None), default=None)

    def _go_on(self, worker: InlineWorker, next_us: int) -> None:
        """Move the clock forward to *next_us*, and deliver the due messages."""
        if next_us > now.time_ns() // 1000:
            self._move(next_us)
        worker.deliver_due()

    def _check(self, worker: InlineWorker, most: int) -> None:
        ran = worker.started - self._before
        if ran >= most:
            raise StillWaiting(
                f"{ran} tasks ran, and another one waits: schedules, and a task that sends itself, "
                f"never end; use advance(), or a higher limit"
            )
