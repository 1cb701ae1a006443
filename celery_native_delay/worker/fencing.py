"""Tasks of fenced runs, as they reach a worker: run, dropped, or put back until that is known.

What a worker knows of a sealed run it remembers. All others are looked up after their message has
come, by a thread with a connection of its own; the event loop never waits for the store. Messages
of a run that is not sealed, and all that cannot be looked up, wait in the broker, not here.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic, time
from typing import Any, Protocol

from celery.utils.log import get_logger

from ..errors import FenceUnavailable
from ..fence import FenceStore, fence_store
from ..fence import run as fence
from ..fence.run import Record, Stamp, Verdict
from ..settings import DelaySettings
from .adoption import EarlyTask, FencedTask

logger = get_logger(__name__)

#: What monitors see of a message that was dropped. Not "task-…": the attempt that ran has the same
#: task id, and its state is not to change.
EVENT = "native_delay-fenced"

#: Sealed runs that a worker remembers; one takes some hundred bytes per partition.
MOST_RUNS = 256

#: Of connecting to the store, and of each answer.
STORE_TIMEOUT_SECONDS = 2.0

#: Messages looked up together.
_BATCH = 1000

#: Until a message is looked up again which could not be put back.
_PAUSE_SECONDS = 1.0

#: Between two warnings that the store does not serve.
_TELL_SECONDS = 30.0


@dataclass(frozen=True)
class Finding:
    """What was found about a message's run; None: nobody could be asked."""

    record: Record | None


class Guard(Protocol):
    """What decides about messages with the header."""

    def admits(self, task: FencedTask) -> bool:
        """Whether *task* is to run now; if not, it has been taken care of."""

    def stop(self) -> None:
        """The worker ends."""


class NoFence:
    """Lets everything run: this worker has not been told where the store is."""

    def __init__(self) -> None:
        self._told = False

    def admits(self, task: FencedTask) -> bool:
        if not self._told:
            self._told = True
            logger.warning(
                "native delay: task %s comes from a fenced run, and this worker has no "
                "native_delay_fence: it runs what every attempt of Spark's has sent, also of jobs "
                "that failed",
                task.id,
            )
        del task.message.headers[fence.HEADER]
        return True

    def stop(self) -> None:
        """Nothing to end."""


class Fence:
    """See the module's docstring. But for stop(), for the consumer's thread."""

    def __init__(
        self, consumer: Any, settings: DelaySettings, put_back: Callable[[EarlyTask], bool]
    ) -> None:
        """*put_back* lets a message wait in the broker; False if nobody can."""
        self._consumer = consumer
        self._put_back = put_back
        self._sealed: OrderedDict[str, Record] = OrderedDict()
        self._settings = settings
        self._lookup: Lookup | None = None
        self._told_unreadable = False

    def admits(self, task: FencedTask) -> bool:
        headers = task.message.headers
        try:
            stamp = Stamp.parse(headers[fence.HEADER])
        except ValueError as exc:
            if not self._told_unreadable:
                self._told_unreadable = True
                logger.warning("native delay: task %s runs unfenced: %s", task.id, exc)
            del headers[fence.HEADER]
            return True
        finding: Finding | None = vars(task.message).pop("fence_finding", None)
        if finding is not None and not task.is_ours:
            return False
        record = finding.record if finding is not None else self._remembered(stamp.run)
        if finding is None and record is None:
            self._look_up(task, stamp.run)
            return False
        if record is None:
            return self._hold(task, stamp.run, None)
        if record.is_final:
            self._remember(stamp.run, record)
        match fence.verdict(record, stamp):
            case Verdict.RUN:
                # The attempt that won is a task like others: its retries are not asked for again.
                del headers[fence.HEADER]
                return True
            case Verdict.DROP:
                self._drop(task, stamp, record)
                return False
        return self._hold(task, stamp.run, record)

    def stop(self) -> None:
        """End the thread; what it was to look up is redelivered by the broker."""
        if self._lookup is not None:
            self._lookup.stop()
            self._lookup = None

    # --- private -------------------------------------------------------------------------

    def _remembered(self, run: str) -> Record | None:
        record = self._sealed.get(run)
        if record is not None:
            self._sealed.move_to_end(run)
        return record

    def _remember(self, run: str, record: Record) -> None:
        self._sealed[run] = record
        if len(self._sealed) > MOST_RUNS:
            self._sealed.popitem(last=False)

    def _look_up(self, task: FencedTask, run: str, *, after_seconds: float = 0.0) -> None:
        """Have *task* judged again; from any thread."""
        if self._lookup is None:
            self._lookup = Lookup(self._settings, str(self._consumer.hostname))
            self._lookup.start()
        self._lookup.ask(Question(task, run, monotonic() + after_seconds))

    def _hold(self, task: FencedTask, run: str, record: Record | None) -> bool:
        """Let it wait in the broker; True if it cannot, as a broadcast, which has no queue."""
        if not task.queue:
            logger.warning("native delay: task %s runs unfenced: it has no queue", task.id)
            return True
        wait_seconds = fence.hold_seconds(record, now=time())
        again = partial(self._look_up, task, run, after_seconds=_PAUSE_SECONDS)
        due_us = round((time() + wait_seconds) * 1_000_000)
        early = EarlyTask(task.message, due_us, task.queue, task.ack, again)
        if not self._put_back(early):
            again()
        else:
            logger.debug("native delay: task %s waits for its run to be sealed", task.id)
        return False

    def _drop(self, task: FencedTask, stamp: Stamp, record: Record) -> None:
        lost = record.state != fence.ABORTED
        logger.info(
            "native delay: task %s[%s] is dropped: %s",
            task.name,
            task.id,
            f"attempt {stamp.attempt} at partition {stamp.partition} of run {stamp.run} lost"
            if lost
            else f"run {stamp.run} was aborted by {record.by}",
        )
        dispatcher = self._consumer.event_dispatcher
        if dispatcher is not None and dispatcher.enabled:
            reason = "lost" if lost else "aborted"
            dispatcher.send(EVENT, uuid=task.id, name=task.name, fence=str(stamp), reason=reason)
        task.message.ack_log_error(logger, self._consumer.connection_errors)


@dataclass(frozen=True)
class Question:
    """What became of *run*, which *task* waits for; not to be asked before *at*, monotonic."""

    task: FencedTask
    run: str
    at: float


class Lookup(Thread):
    """Asks the store, and seals what nobody sealed in time; a connection of its own."""

    def __init__(self, settings: DelaySettings, worker: str) -> None:
        super().__init__(name="native-delay-fence", daemon=True)
        assert settings.fence is not None
        self._url = settings.fence
        self._policy = settings.fence_policy
        self._keep_seconds = settings.longest_delay_seconds + fence.MARGIN_SECONDS
        self._worker = worker
        self._questions: SimpleQueue[Question | None] = SimpleQueue()
        self._stopping = Event()
        self._store: FenceStore | None = None
        self._next_telling = 0.0

    def ask(self, question: Question) -> None:
        """Attach what is found to the task's message, then have it judged again."""
        self._questions.put(question)

    def stop(self, *, timeout_seconds: float = 5.0) -> None:
        """End the thread."""
        self._stopping.set()
        self._questions.put(None)
        self.join(timeout_seconds)

    # --- the thread ----------------------------------------------------------------------

    def run(self) -> None:
        with ExitStack() as stack:
            while not self._stopping.is_set():
                batch = self._take_batch()
                found = self._found({question.run for question in batch}, stack)
                for question in batch:
                    question.task.message.fence_finding = Finding(found.get(question.run))
                    question.task.again()

    def _take_batch(self) -> list[Question]:
        batch: list[Question] = []
        question = self._questions.get()
        while question is not None:
            batch.append(question)
            try:
                question = self._questions.get_nowait() if len(batch) < _BATCH else None
            except Empty:
                break
        if batch:
            # Only what could not be put back has to wait here, and all others with it.
            self._stopping.wait(max(question.at for question in batch) - monotonic())
        return [] if self._stopping.is_set() else batch

    def _found(self, runs: set[str], stack: ExitStack) -> dict[str, Record]:
        """The records of *runs*, those that had to be given up among them; none on an error."""
        if not runs:
            return {}
        found: dict[str, Record] = {}
        try:
            if self._store is None:
                self._store = stack.enter_context(
                    fence_store(self._url, timeout_seconds=STORE_TIMEOUT_SECONDS)
                )
            asked = sorted(runs)
            for run, record in zip(asked, self._store.load(asked), strict=True):
                now = time()
                if record is None or fence.is_overdue(record, now=now):
                    record = self._given_up(self._store, run, record, now)
                found[run] = record
        except Exception as exc:  # the thread must outlive whatever a store answers
            self._tell(exc)
        return found

    def _given_up(self, store: FenceStore, run: str, record: Record | None, now: float) -> Record:
        """Seal *run* by policy, so that all workers do the same; what is sealed meanwhile stays."""
        mine = fence.given_up(self._policy, now=now, by=self._worker)
        sealed = store.seal(run, mine, ttl_seconds=self._keep_seconds)
        if sealed == mine:
            logger.warning(
                "native delay: %s: as native_delay_fence_policy says, %s",
                f"run {run} was not sealed in time, has its driver died?"
                if record is not None
                else f"the fence's store has lost run {run}",
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
            exc_info=not isinstance(exc, FenceUnavailable),
        )
