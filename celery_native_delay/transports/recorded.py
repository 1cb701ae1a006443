"""Shared code for RabbitMQ, SQS and pgmq, which cannot list their waiting messages."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from time import time_ns
from typing import Any, ClassVar

from ..durations import duration
from ..errors import NativeDelayError, NoRecords, RecordsUnavailable
from ..finding import WRONG, Finding
from ..message import Delayed
from ..rates.line import Lines
from ..records.interface import Records
from ..records.opened import records_of_process
from ..records.waiting import Query, WaitingTasks
from ..settings import DelaySettings
from ..texts import is_text
from ..urls import is_redis_url
from .interface import (
    Answer,
    Backlog,
    ParkedTask,
    Receipts,
    Rescue,
    WorkerPart,
    without_records,
)

#: A task that no worker has received so many seconds after its due time is a problem.
PATIENCE_SECONDS = 60.0

_START_WORKERS = "start workers with install(app) that consume from their queues, or more of them"


def records_beside(settings: DelaySettings, place: str) -> Any:
    """Return the storage in ``native_delay_records`` for *place* (such as a vhost), if set."""
    if settings.records is None:
        return None
    return records_of_process(settings.records, f"{settings.namespace}.{place}")


def member_of(headers: Mapping[str, Any], delivery_id: str) -> str | None:
    """Return a message's name in the list of waiting tasks: ``<task id>:<delivery id>``.

    This package gives each delayed message a delivery id. Return None if the message is not a
    Celery task of protocol 2.
    """
    task_id = headers.get("id")
    if "task" not in headers or not task_id or not is_text(task_id):
        return None
    return f"{task_id}:{delivery_id}"


def with_records(backlog: Backlog, channel: Any, settings: DelaySettings) -> Backlog:
    """Add data from the list of waiting tasks to *backlog*, the message counts of a broker.

    Return a copy with the number of listed tasks and the earliest due time. If the list is not
    configured, return *backlog* unchanged.
    """
    if channel.delays.records is None:
        return backlog
    try:
        with closing(channel.waiting_tasks(settings)) as tasks:
            span, known = tasks.span(), tasks.count()
    except RecordsUnavailable:
        return replace(backlog, records_answer=False)
    first_us = None if span is None else span[0] - time_ns() // 1000
    return replace(backlog, records_answer=True, until_first_us=first_us, in_records=known)


@dataclass(frozen=True)
class RecordsStatus:
    """Counts from the list of waiting tasks: overdue tasks, and tasks not yet due."""

    where: str
    #: The error that prevented counting.
    error: str | None = None
    #: The number of tasks that are not due yet.
    ahead: int = 0
    next_due_seconds: float | None = None
    #: The number of due tasks that no worker with this package has received.
    overdue: int = 0
    overdue_seconds: float = 0.0

    @classmethod
    def read(cls, channel: Any, settings: DelaySettings) -> RecordsStatus | None:
        """Count the tasks of the list; None if ``native_delay_records`` is not set."""
        if channel.delays.records is None:
            return None
        where = channel.delays.records.where
        try:
            with closing(channel.waiting_tasks(settings)) as tasks:
                return cls.of(tasks, where, now_us=time_ns() // 1000)
        except NativeDelayError as exc:
            return cls(where, error=str(exc))

    @classmethod
    def of(cls, tasks: WaitingTasks, where: str, *, now_us: int) -> RecordsStatus:
        """Count the overdue and the future *tasks*; *where* is the URL of their storage."""
        ahead = Query(from_us=now_us)
        page, count = tasks.page(ahead, limit=1), tasks.count(ahead)
        next_due_seconds = (page.tasks[0].due_us - now_us) / 1e6 if page.tasks else None
        span = tasks.span()
        first_us = now_us if span is None else min(span[0], now_us)
        overdue = tasks.count(Query(until_us=now_us))
        return cls(where, None, count, next_due_seconds, overdue, (now_us - first_us) / 1e6)

    def findings(self, *, parked: int) -> list[Finding]:
        """Report overdue tasks, unless all of them are *parked* messages."""
        if self.overdue <= parked or self.overdue_seconds <= PATIENCE_SECONDS:
            return []
        problem = (
            f"{self.overdue} task(s) overdue, the first for {duration(self.overdue_seconds)}; "
            f"no installed worker has received them"
        )
        return [Finding("overdue", WRONG, problem, _START_WORKERS)]


class RecordedChannel:
    """A channel mixin for brokers that cannot list their waiting messages."""

    connection: Any
    delays: Any

    republisher: ClassVar[type[Any]]
    """The class that publishes waiting messages again from stored copies."""

    def records(self, settings: DelaySettings) -> Records:
        """Return the storage for task state, such as debounce keys.

        Raise UnsupportedBroker if ``native_delay_records`` is not set.
        """
        records: Records | None = self.delays.records
        if records is None:
            raise without_records(self)
        return records

    def waiting_tasks(self, settings: DelaySettings) -> WaitingTasks:
        """Return the list of waiting tasks; raise NoRecords without ``native_delay_records``."""
        if self.delays.records is None:
            raise NoRecords(
                f"{self.connection.client.as_uri()} cannot list its waiting messages: to list, "
                f"cancel and reschedule tasks, set native_delay_records in workers and producers "
                f"to the URL of a Redis or of a database"
            )
        tasks: WaitingTasks = self.delays.records.tasks(self.republisher(self.delays))
        return tasks

    def lines(self, settings: DelaySettings) -> Lines:
        """Return the storage of rate-limited tasks; raise NoRecords if there is no storage."""
        records = self.delays.records
        if records is None:
            raise NoRecords(
                "native_delay_rates needs records beside this broker: set native_delay_records = "
                '"redis://…", or the SQLAlchemy URL of a database, in workers and producers'
            )
        if not is_redis_url(records.url):
            from ..rates.in_records import RecordLines

            return RecordLines(records)
        from ..rates.in_redis import RedisLines

        return RedisLines(records.pool, records.keys.space, records.where)


class IndexReceipts:
    """Looks up received messages in the list of waiting tasks, to recognise cancelled tasks."""

    def __init__(self, records: Any) -> None:
        self._records = records
        records.connect()

    def may_run(self, headers: Mapping[str, Any], delayed: Delayed) -> Answer:
        member = member_of(headers, delayed.delivery_id)
        may_run = True if member is None else self._records.received(member)
        return {True: Answer.RUN, False: Answer.DROP, None: Answer.AWAY}[may_run]

    def close(self) -> None:
        """Keep the Redis or database connection open, because the whole process shares it."""


class RecordedWorkerPart(WorkerPart):
    @property
    def terms(self) -> str:
        records = self._delays.records
        where = "no records" if records is None else f"records at {records.where}"
        return f"{super().terms}; {where}"

    def receipts(self) -> Receipts | None:
        records = self._delays.records
        return None if records is None else IndexReceipts(records)

    def sweep(self) -> int:
        records = self._delays.records
        return 0 if records is None else records.sweep()


class NothingParked:
    """Methods for brokers that never have parked (due, but undeliverable) messages."""

    def parked(self, *, limit: int) -> tuple[int, list[ParkedTask]]:
        return 0, []

    def requeue(self) -> Rescue:
        return Rescue()

    def purge_parked(self) -> int:
        return 0
