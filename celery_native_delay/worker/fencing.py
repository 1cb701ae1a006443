"""The gate for tasks of fenced runs: run, dropped, or put back until that is known.

What a worker knows of a sealed run it remembers. All others are looked up after their message has
come, by a thread of its own; the event loop never waits for the records. Messages of a run that is
not sealed, and all that cannot be looked up, wait in the broker, not here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic, time
from typing import Any

from celery.utils.log import get_logger
from kombu.utils.functional import LRUCache

from ..errors import RecordsUnavailable
from ..fence import run as fence
from ..fence.in_records import Runs
from ..fence.run import Fate, Record, Stamp
from ..records.opened import Place, records_of_process
from ..settings import DelaySettings
from .arrival import Arrival, AskAgain, Drop, LookUp, Ruling, WaitUntil

logger = get_logger(__name__)

#: What monitors see of a message that was dropped. Not "task-…": the attempt that ran has the same
#: task id, and its state is not to change.
EVENT = "native_delay-fenced"

#: Sealed runs that a worker remembers; one takes some hundred bytes per partition.
MOST_RUNS = 256

#: Messages looked up together.
_BATCH = 1000

#: Until a message is looked up again which could not be put back.
PAUSE_SECONDS = 1.0

#: Between two warnings that the records are away.
_TELL_SECONDS = 30.0


class Fence:
    """The gate for tasks of fenced runs; without records all of them run."""

    def __init__(self, settings: DelaySettings, worker: str, place: Place | None) -> None:
        """*worker* is its name, by which it seals runs; *place* is where those are recorded."""
        self._settings = settings
        self._worker = worker
        self._place = place
        self._sealed: MutableMapping[str, Record] = LRUCache(limit=MOST_RUNS)
        self._lookup: Lookup | None = None
        self._told: set[str] = set()

    def __call__(self, arrival: Arrival) -> Ruling | None:
        headers = arrival.message.headers
        if fence.HEADER not in headers:
            return None
        stamp = self._stamp(arrival)
        if stamp is None:
            del headers[fence.HEADER]
            return None
        record = self._sealed.get(stamp.run)
        if record is None:
            if self not in arrival.found:
                return LookUp(partial(self._look_up, stamp.run))
            record = arrival.found[self]
            if record is None:
                return self._hold(arrival, None)
            if record.is_final:
                self._sealed[stamp.run] = record
        match fence.fate(record, stamp):
            case Fate.RUN:
                # The attempt that won is a task like others: its retries are not asked for again.
                del headers[fence.HEADER]
                return None
            case Fate.DROP:
                return _lost(stamp, record)
        return self._hold(arrival, record)

    def stop(self) -> None:
        """End the thread; what it was to look up is redelivered by the broker."""
        if self._lookup is not None:
            self._lookup.stop()
            self._lookup = None

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

    def _look_up(self, run: str, found: Callable[[Record | None], None]) -> None:
        if self._lookup is None:
            assert self._place is not None
            self._lookup = Lookup(self._settings, self._worker, self._place)
            self._lookup.start()
        self._lookup.ask(Question(run, found))

    @staticmethod
    def _hold(arrival: Arrival, record: Record | None) -> Ruling | None:
        """Let it wait in the broker; a broadcast, which has no queue, passes."""
        if not arrival.queue:
            logger.warning("native delay: task %s runs unfenced: it has no queue", arrival.id)
            return None
        logger.debug("native delay: task %s waits for its run to be sealed", arrival.id)
        wait_seconds = fence.hold_seconds(record, now=time())
        due_us = round((time() + wait_seconds) * 1_000_000)
        return WaitUntil(due_us, otherwise=AskAgain(PAUSE_SECONDS))


def _lost(stamp: Stamp, record: Record) -> Drop:
    if record.state == fence.ABORTED:
        why, reason = f"run {stamp.run} was aborted by {record.by}", "aborted"
    else:
        why, reason = (
            f"attempt {stamp.attempt} at partition {stamp.partition} of run {stamp.run} lost",
            "lost",
        )
    return Drop(why, EVENT, {"fence": str(stamp), "reason": reason})


@dataclass(frozen=True)
class Question:
    """A question to the records, what became of *run*; *found* gets its record, or None."""

    run: str
    found: Callable[[Record | None], None]


class Lookup(Thread):
    """The thread that asks the records, and seals what was not sealed in time."""

    def __init__(self, settings: DelaySettings, worker: str, place: Place) -> None:
        super().__init__(name="native-delay-fence", daemon=True)
        self._place = place
        self._policy = settings.fence_policy
        self._keep_seconds = settings.longest_delay_seconds + fence.MARGIN_SECONDS
        self._worker = worker
        self._questions: SimpleQueue[Question | None] = SimpleQueue()
        self._stopping = Event()
        self._next_telling = 0.0

    def ask(self, question: Question) -> None:
        self._questions.put(question)

    def stop(self, *, timeout_seconds: float = 5.0) -> None:
        self._stopping.set()
        self._questions.put(None)
        self.join(timeout_seconds)

    # --- the thread ----------------------------------------------------------------------

    def run(self) -> None:
        while not self._stopping.is_set():
            batch = self._take_batch()
            found = self._found({question.run for question in batch})
            for question in batch:
                question.found(found.get(question.run))

    def _take_batch(self) -> list[Question]:
        batch: list[Question] = []
        question = self._questions.get()
        while question is not None:
            batch.append(question)
            try:
                question = self._questions.get_nowait() if len(batch) < _BATCH else None
            except Empty:
                break
        return [] if self._stopping.is_set() else batch

    def _found(self, names: set[str]) -> dict[str, Record]:
        """The records of these runs, also of those that are given up now; none on an error."""
        if not names:
            return {}
        found: dict[str, Record] = {}
        try:
            runs, asked = Runs(records_of_process(*self._place)), sorted(names)
            for run, record in zip(asked, runs.load(asked), strict=True):
                now = time()
                if record is None or fence.is_overdue(record, now=now):
                    record = self._given_up(runs, run, record, now)
                found[run] = record
        except Exception as exc:  # the thread must outlive whatever the records answer
            self._tell(exc)
        return found

    def _given_up(self, runs: Runs, run: str, record: Record | None, now: float) -> Record:
        """Seal *run* by policy, so that all workers do the same; what is sealed meanwhile stays."""
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
            "native delay: tasks of fenced runs wait in the broker, others run: %s: %s",
            type(exc).__name__,
            exc,
            exc_info=not isinstance(exc, RecordsUnavailable),
        )
