"""If Spark repeats a partition, drops the Celery tasks that unsuccessful attempts have sent.

Due tasks wait in the broker until the Spark driver has stored which attempts were successful. The
only exception: if the driver stores no result before the run's deadline,
``native_delay_fence_policy`` decides: workers run all tasks, or drop all tasks.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from math import inf
from time import monotonic, time
from typing import Any

from celery.utils.log import get_logger
from kombu.utils.functional import LRUCache

from ..errors import RecordsUnavailable, described
from ..fence import run as fence
from ..fence.in_records import Runs
from ..fence.run import Fate, Record, Stamp
from ..records.opened import RecordsLocation, records_of_process
from ..settings import DelaySettings
from .arrival import Arrival, AskAgain, Drop, Ruling, WaitUntil

logger = get_logger(__name__)

#: Type of the event for a dropped message. Not "task-…": the attempt that runs has the same task
#: id, and monitors must not change its state.
EVENT = "native_delay-fenced"

#: Number of runs that a worker remembers. Each run takes some hundred bytes per partition.
MOST_RUNS = 256

#: Seconds until a message is checked again that could not be put back into the broker.
PAUSE_SECONDS = 1.0

#: Seconds until the state of a run is read again, if the run has not ended or the read failed.
_REMEMBERED_SECONDS = 1.0

#: Seconds between two warnings that the records are unreachable.
_WARN_SECONDS = 30.0


class Fence:
    """A check before a Celery task runs: drop tasks that unsuccessful Spark attempts have sent."""

    def __init__(
        self, settings: DelaySettings, worker: str, location: RecordsLocation | None
    ) -> None:
        self._policy = settings.fence_policy
        self._keep_seconds = settings.longest_delay_seconds + fence.MARGIN_SECONDS
        self._worker = worker
        self._location = location
        #: By run: the run's stored state, or None if it could not be read, and the monotonic time
        #: until which the worker uses this state.
        self._known: MutableMapping[str, tuple[Record | None, float]] = LRUCache(limit=MOST_RUNS)
        self._warned: set[str] = set()
        self._next_warning = 0.0

    def __call__(self, arrival: Arrival) -> Ruling | None:
        headers = arrival.message.headers
        if fence.HEADER not in headers:
            return None
        stamp = self._stamp(arrival)
        if stamp is None:
            del headers[fence.HEADER]
            return None
        record = self._record_of(stamp.run)
        match Fate.HOLD if record is None else fence.fate(record, stamp):
            case Fate.RUN:
                # Without the header its retries run like those of any task.
                del headers[fence.HEADER]
                return None
            case Fate.DROP:
                assert record is not None
                return _lost(stamp, record)
        return _hold(arrival, record)

    def _stamp(self, arrival: Arrival) -> Stamp | None:
        """Read the Spark run, partition and attempt from the message's header.

        Returns None, so that the task runs unchecked, if the header is invalid or the worker has
        no ``native_delay_records``.
        """
        if self._location is None:
            self._warn_once(
                "native delay: task %s is of a fenced run, but this worker has no "
                "native_delay_records: it runs the tasks of all attempts, even of failed jobs",
                arrival.id,
            )
            return None
        try:
            return Stamp.parse(arrival.message.headers[fence.HEADER])
        except ValueError as exc:
            self._warn_once("native delay: task %s runs unfenced: %s", arrival.id, exc)
            return None

    def _warn_once(self, text: str, *args: Any) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text, *args)

    def _record_of(self, run: str) -> Record | None:
        """Return the stored state of *run* (one Spark job), or None if reading fails."""
        record, until = self._known.get(run, (None, 0.0))
        if monotonic() < until:
            return record
        try:
            record = self._looked_up(run)
        except Exception as exc:  # also for a record that is no JSON
            record = None
            self._warn(exc)
        # Not ABORTED: a run that is opened again must not lose messages.
        if record is None or record.state == fence.OPEN:
            self._known[run] = record, monotonic() + _REMEMBERED_SECONDS
        elif record.is_final:
            self._known[run] = record, inf
        return record

    def _looked_up(self, run: str) -> Record:
        assert self._location is not None
        runs, now = Runs(records_of_process(*self._location)), time()
        [record] = runs.load([run])
        if record is not None and not fence.is_overdue(record, now=now):
            return record
        # The record makes all workers do the same. A decision recorded meanwhile stays.
        mine = fence.given_up(self._policy, now=now, by=self._worker)
        sealed = runs.seal(run, mine, kept_seconds=self._keep_seconds)
        if (sealed.state, sealed.by) == (mine.state, mine.by):
            logger.warning(
                "native delay: %s: as native_delay_fence_policy says, %s",
                f"run {run} was not sealed in time, its driver may have died"
                if record is not None
                else f"the record of run {run} is lost",
                "all of its tasks run, perhaps twice"
                if self._policy == "run"
                else "its tasks are dropped",
            )
        return sealed

    def _warn(self, exc: Exception) -> None:
        if monotonic() < self._next_warning:
            return
        self._next_warning = monotonic() + _WARN_SECONDS
        logger.warning(
            "native delay: tasks of fenced runs wait, as their records cannot be read: %s",
            described(exc),
            exc_info=not isinstance(exc, RecordsUnavailable),
        )


def _hold(arrival: Arrival, record: Record | None) -> Ruling | None:
    """Let the task wait in the broker for the result of its Spark run; a broadcast task runs."""
    if not arrival.queue:
        logger.warning("native delay: task %s runs unfenced: it has no queue", arrival.id)
        return None
    logger.debug("native delay: task %s waits for its run to be sealed", arrival.id)
    wait_us = round(fence.hold_seconds(record, now=time()) * 1_000_000)
    return WaitUntil(arrival.now_us + wait_us, otherwise=AskAgain(PAUSE_SECONDS))


def _lost(stamp: Stamp, record: Record) -> Drop:
    if record.state == fence.ABORTED:
        why, reason = f"run {stamp.run} was aborted by {record.by}", "aborted"
    else:
        why, reason = (
            f"attempt {stamp.attempt} at partition {stamp.partition} of run {stamp.run} lost",
            "lost",
        )
    return Drop(why, EVENT, {"fence": str(stamp), "reason": reason})
