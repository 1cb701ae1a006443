"""The records beside a broker that cannot be looked into, as its transport uses them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from time import time_ns
from typing import Any

from ..errors import NoRecords, RecordsUnavailable
from ..message import Delayed
from ..rates.line import Lines
from ..records.opened import records_of_process
from ..settings import DelaySettings
from ..texts import is_text
from ..urls import is_redis_url
from .interface import Answer, Backlog, ParkedTask, Receipts, Rescue, WorkerPart


def records_beside(settings: DelaySettings, place: str) -> Any:
    """The records of what waits at *place*, such as a virtual host; None where none are kept."""
    if settings.records is None:
        return None
    return records_of_process(settings.records, f"{settings.namespace}.{place}")


def lines_beside(records: Any) -> Lines:
    """The lines of rated tasks in *records*; NoRecords if those are None."""
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


def member_of(headers: Mapping[str, Any], delivery_id: str) -> str | None:
    """The name of a task's entry; None for a message that is no Celery task of protocol 2.

    Other consumers of delayed messages ask no records.
    """
    task_id = headers.get("id")
    if "task" not in headers or not task_id or not is_text(task_id):
        return None
    return f"{task_id}:{delivery_id}"


def with_records(backlog: Backlog, channel: Any, settings: DelaySettings) -> Backlog:
    """*backlog* of the broker of *channel*, with what the records beside it say, if any."""
    if channel.delays.records is None:
        return backlog
    try:
        with closing(channel.waiting_tasks(settings)) as tasks:
            span, known = tasks.span(), tasks.count()
    except RecordsUnavailable:
        return replace(backlog, records_answer=False)
    first_us = None if span is None else span[0] - time_ns() // 1000
    return replace(backlog, records_answer=True, until_first_us=first_us, in_records=known)


class IndexReceipts:
    """Receipts from *records*, which are asked each time."""

    def __init__(self, records: Any) -> None:
        self._records = records
        records.connect()

    def may_run(self, headers: Mapping[str, Any], delayed: Delayed) -> Answer:
        member = member_of(headers, delayed.delivery_id)
        may_run = True if member is None else self._records.received(member)
        return {True: Answer.RUN, False: Answer.DROP, None: Answer.AWAY}[may_run]

    def close(self) -> None:
        """The records are the process's."""


class RecordedWorkerPart(WorkerPart):
    """A worker's part on a broker that cannot be looked into, with records beside it or without."""

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
    """The part of an admin part on a broker where no message is ever parked."""

    def parked(self, *, limit: int) -> tuple[int, list[ParkedTask]]:
        return 0, []

    def requeue(self) -> Rescue:
        return Rescue()

    def purge_parked(self) -> int:
        return 0
