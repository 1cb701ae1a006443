"""The gate for tasks of fenced runs: run, dropped, or put back until that is known.

A worker remembers sealed runs. Messages of a run that is not sealed, or whose record cannot be
read, wait in the broker, not here.
"""

from __future__ import annotations

import logging
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
from ..records.opened import Place, records_of_process
from ..settings import DelaySettings
from .arrival import Arrival, AskAgain, Drop, Ruling, WaitUntil

logger = get_logger(__name__)

#: What monitors see of a message that was dropped. Not "task-…": the attempt that ran has the same
#: task id, and its state is not to change.
EVENT = "native_delay-fenced"

#: Runs that a worker remembers; one takes some hundred bytes per partition.
MOST_RUNS = 256

#: Until a message is looked up again which could not be put back.
PAUSE_SECONDS = 1.0

#: For so long an open run, and records that are away, are not asked for again.
_REMEMBERED_SECONDS = 1.0

#: Between two warnings that the records are away.
_TELL_SECONDS = 30.0


class Fence:
    """The gate for tasks of fenced runs; without records all of them run."""

    def __init__(self, settings: DelaySettings, worker: str, place: Place | None) -> None:
        """*worker* is its name, by which it seals runs; *place* is where those are recorded."""
        self._policy = settings.fence_policy
        self._keep_seconds = settings.longest_delay_seconds + fence.MARGIN_SECONDS
        self._worker = worker
        self._place = place
        #: Records by the names of their runs, None for one that could not be read; and until when
        #: that counts, by the monotonic clock.
        self._known: MutableMapping[str, tuple[Record | None, float]] = LRUCache(limit=MOST_RUNS)
        self._told: set[str] = set()
        self._next_telling = 0.0

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
                # The attempt that won is a task like others: its retries are not asked for again.
                del headers[fence.HEADER]
                return None
            case Fate.DROP:
                assert record is not None
                return _lost(stamp, record)
        return _hold(arrival, record)

    def _stamp(self, arrival: Arrival) -> Stamp | None:
        """The attempt that sent a message, None if its task runs whichever that was."""
        if self._place is None:
            self._tell_once(
                "native delay: task %s comes from a fenced run, and this worker has no "
                "native_delay_records: it runs what every attempt of Spark's has sent, also of "
                "jobs that failed",
                arrival.id,
            )
            return None
        try:
            return Stamp.parse(arrival.message.headers[fence.HEADER])
        except ValueError as exc:
            self._tell_once("native delay: task %s runs unfenced: %s", arrival.id, exc)
            return None

    def _tell_once(self, text: str, *args: Any) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning(text, *args)

    def _record_of(self, run: str) -> Record | None:
        """The record of *run*, which this worker seals if it is overdue; None if it is unknown."""
        record, until = self._known.get(run, (None, 0.0))
        if monotonic() < until:
            return record
        try:
            record = self._looked_up(run)
        except Exception as exc:  # whatever the records answer
            record = None
            self._tell(exc)
        # An aborted run may be opened again, and then none of its messages may be dropped.
        if record is None or record.state == fence.OPEN:
            self._known[run] = record, monotonic() + _REMEMBERED_SECONDS
        elif record.is_final:
            self._known[run] = record, inf
        return record

    def _looked_up(self, run: str) -> Record:
        assert self._place is not None
        runs, now = Runs(records_of_process(*self._place)), time()
        [record] = runs.load([run])
        if record is not None and not fence.is_overdue(record, now=now):
            return record
        # Sealed by policy, so that all workers do the same; what is sealed meanwhile stays.
        mine = fence.given_up(self._policy, now=now, by=self._worker)
        sealed = runs.seal(run, mine, kept_seconds=self._keep_seconds)
        if (sealed.state, sealed.by) == (mine.state, mine.by):
            logger.warning(
                "native delay: %s: as native_delay_fence_policy says, %s",
                f"run {run} was not sealed in time, has its driver died?"
                if record is not None
                else f"the records have lost run {run}",
                "all of its tasks run, perhaps twice"
                if self._policy == "run"
                else "its tasks are dropped",
            )
        return sealed

    def _tell(self, exc: Exception) -> None:
        if monotonic() < self._next_telling:
            return
        self._next_telling = monotonic() + _TELL_SECONDS
        logger.log(
            logging.WARNING,
            "native delay: tasks of fenced runs wait in the broker, others run: %s",
            described(exc),
            exc_info=not isinstance(exc, RecordsUnavailable),
        )


def _hold(arrival: Arrival, record: Record | None) -> Ruling | None:
    """Let it wait in the broker; a broadcast, which has no queue, passes."""
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
