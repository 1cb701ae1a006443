"""``Run``: all tasks that one run of a Spark fan-out has sent, by the name of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from celery import Celery
from kombu.utils.imports import symbol_by_name

from ..durations import DAY_US
from ..errors import CannotDelay, InvalidFanOut
from ..keyed.record import has_run_once, name_of_once
from ..now import moment, time_ns
from ..records.interface import RecordName, Records
from ..records.runs import (
    RUN_KIND,
    RunRecord,
    begin_run,
    change_run,
    ended,
    latest_runs,
    read_run,
)
from ..records.waiting import Query
from ..settings import DelaySettings
from ..urls import is_redis_url
from .installation import ask_broker, checked_app, installed

T = TypeVar("T")


@dataclass(frozen=True)
class RunStatus:
    """The state of a :class:`Run` at one moment.

    - *began*: the beginning of its first try, in UTC. *tries*: how often it was sent.
    - *planned*, *sent*, *rejected*: the numbers of rows of its largest try.
    - *waiting*: the number of tasks that wait; None if some wait in a broker that cannot list them.
    - *left*: the number of tasks that no longer wait: they are in a queue, run, or have run.
    - *moved_seconds*: the time by which :meth:`Run.reschedule` has moved the due times.
    - *cancelled*: True if its tasks do not run any more.
    """

    run_id: str
    task: str
    began: datetime
    tries: int
    planned: int
    sent: int
    rejected: int
    waiting: int | None
    left: int | None
    moved_seconds: float
    cancelled: bool

    def as_json(self) -> dict[str, Any]:
        """Return the status as a dict, for the option ``--json``."""
        return {**vars(self), "began": self.began.isoformat(timespec="seconds")}


class Run:
    """All tasks of one run of a Spark fan-out, in any process that has the app.

    >>> Run("reminders-2026-11-20", app=app).cancel()  # doctest: +SKIP

    The state of a run is in the store or the Redis broker, for as many days after its last task as
    ``native_delay_once`` says (7). Every method raises NoStore if there is neither, and
    StoreUnavailable if it does not answer.

    Args:
        run_id: the name of the run.
        app: the Celery app, or its import path such as ``"shop.app:app"``.
    """

    def __init__(self, run_id: str, *, app: Celery | str) -> None:
        self.run_id = run_id
        self._path = app

    def status(self) -> RunStatus:
        """Return the numbers of the run's rows and waiting tasks.

        Raises:
            InvalidFanOut: the run is unknown.
        """
        return self._ask(
            lambda channel, settings: _counted(channel, settings, self._record(channel, settings))
        )

    def cancel(self) -> None:
        """Let no task of this run start any more, also those in a queue. They are not removed.

        Workers announce each as revoked when it is due. Tasks that have started go on.

        Raises:
            InvalidFanOut: the run is unknown.
        """
        self._change(lambda known, _: replace(known, cancelled=True))

    def reschedule(self, *, by: timedelta | float) -> int:
        """Move the due times of all waiting tasks of this run; return their number.

        A repeated ``send()`` of this run then uses the new due times. A due time in the past means
        now. The tasks are moved one after another: a call that is interrupted has moved some.

        Args:
            by: the time to add, in seconds, or as a timedelta; negative is earlier.

        Raises:
            InvalidFanOut: the run is unknown.
            CannotDelay: some of its tasks wait in a broker that cannot change them.
            DelayTooLong: a new due time is too far away.
        """
        seconds = by.total_seconds() if isinstance(by, timedelta) else by
        by_us = round(seconds * 1_000_000)

        def moved(channel: Any, settings: DelaySettings) -> int:
            self._record(channel, settings)
            with closing(channel.waiting_tasks(settings)) as found:
                if found.note_elsewhere is not None:
                    raise CannotDelay(
                        f"expected all tasks of run {self.run_id!r} to wait in the store, but this "
                        f"app lets some wait in the broker, which cannot change them: cancel() "
                        f"works there, too"
                    )
                count: int = found.move_all(Query(run=self.run_id), by_us, time_ns() // 1000)
            change_run(
                channel.records(settings),
                self.run_id,
                lambda known, _: replace(
                    known,
                    moved_us=known.moved_us + by_us,
                    kept_us=known.kept_us + max(by_us, 0),
                ),
            )
            return count

        return self._ask(moved)

    # --- private -------------------------------------------------------------------------

    def _ask(self, question: Callable[[Any, DelaySettings], T]) -> T:
        app = symbol_by_name(self._path) if isinstance(self._path, str) else self._path
        return ask_broker(checked_app(app), question)

    def _record(self, channel: Any, settings: DelaySettings) -> RunRecord:
        return self._known(read_run(channel.records(settings), self.run_id))

    def _change(self, change: Callable[[RunRecord, int], RunRecord]) -> RunRecord:
        return self._known(
            self._ask(
                lambda channel, settings: change_run(channel.records(settings), self.run_id, change)
            )
        )

    def _known(self, record: RunRecord | None) -> RunRecord:
        if record is None:
            raise InvalidFanOut(
                f"expected the name of a run that was sent and not yet forgotten, got "
                f"{self.run_id!r}: `celery -A proj delay runs` lists them"
            )
        return record


def runs_of(app: Celery, limit: int, *, counts: bool = True) -> list[RunStatus]:
    """Return up to *limit* runs of an app, those with the latest tasks first.

    *counts* reads all waiting tasks once for each run; without it, their number is None.
    """

    def looked(channel: Any, settings: DelaySettings) -> list[RunStatus]:
        found = latest_runs(channel.records(settings), limit)
        if not counts:
            return [_status(record) for record in found]
        return [_counted(channel, settings, record) for record in found]

    return ask_broker(app, looked)


def open_run(
    app: Celery, run_id: str, task: str, now_us: int, job: str, kind: str = RUN_KIND
) -> RunRecord | None:
    """Note that a job sends a run; return its state, or None without a store and a Redis broker.

    Raises:
        InvalidFanOut: the run was cancelled.
        StoreUnavailable: the store does not answer; so nothing was sent.
    """
    record = _on_records(app, partial(_begun, run_id, task, now_us, job=job, kind=kind))
    if record is not None and record.cancelled:
        raise InvalidFanOut(
            f"expected a run that was not cancelled, got {run_id!r}: choose another run_id"
        )
    return record


def close_run(app: Celery, run_id: str, counts: dict[str, int], last_us: int) -> None:
    """Store the numbers of one try of a run, whose last task is due at *last_us*."""
    settings = installed(app).settings()

    def counted(known: RunRecord, now_us: int) -> RunRecord:
        kept_us = round(settings.once_days(known.task) * DAY_US)
        largest = {name: max(count, getattr(known, name)) for name, count in counts.items()}
        return replace(ended(known, now_us, last_us=last_us, kept_us=kept_us), **largest)

    _on_records(app, lambda records, _: change_run(records, run_id, counted))


def have_run(app: Celery, task: str, task_ids: Sequence[str]) -> set[str]:
    """Return those of the tasks that are ``once`` and have succeeded."""
    names = [RecordName("key", name_of_once(task, each, 0)) for each in task_ids]
    texts = _on_records(app, lambda records, _: records.load(names)) or ()
    pairs = zip(task_ids, texts, strict=False)
    return {task_id for task_id, text in pairs if has_run_once(text)}


def _begun(
    run_id: str, task: str, now_us: int, records: Records, settings: DelaySettings, **more: str
) -> RunRecord:
    longest_us = round(settings.longest_delay_seconds * 1_000_000)
    return begin_run(records, run_id, task, now_us, longest_us=longest_us, **more)


def _on_records(app: Celery, call: Callable[[Records, DelaySettings], T]) -> T | None:
    settings = installed(app).settings()
    url = app.connection_for_write().as_uri()
    if settings.store is None and not is_redis_url(url):
        return None
    return ask_broker(app, lambda channel, chosen: call(channel.records(chosen), chosen))


def _counted(channel: Any, settings: DelaySettings, record: RunRecord) -> RunStatus:
    with closing(channel.waiting_tasks(settings)) as found:
        if found.note_elsewhere is not None:
            return _status(record)
        query = Query(run=record.run_id)
        if record.tries > 1:  # a Redis broker has messages of each try
            return _status(record, len(set(found.ids(query))))
        return _status(record, found.count(query))


def _status(record: RunRecord, waiting: int | None = None) -> RunStatus:
    return RunStatus(
        run_id=record.run_id,
        task=record.task,
        began=moment(record.began_us),
        tries=record.tries,
        planned=record.rows,
        sent=record.sent,
        rejected=record.rejected,
        waiting=waiting,
        left=None if waiting is None else max(record.sent - waiting, 0),
        moved_seconds=record.moved_us / 1_000_000,
        cancelled=record.cancelled,
    )
