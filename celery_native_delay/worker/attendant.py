"""A worker's thread that returns early tasks to the broker until the due time.

The thread also publishes unroutable messages again. The thread has its own connection. On the
worker's connection, this thread would receive new tasks while it waits for a confirm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import Any, TypeVar

from amqp.exceptions import AMQPError
from celery.utils.log import get_logger
from kombu.exceptions import KombuError

from ..errors import (
    ManagementUnavailable,
    NativeDelayError,
    NotPermitted,
    StoreUnavailable,
    described,
)
from ..finding import WRONG
from ..settings import DelaySettings
from ..transports.interface import Wait, WorkerPart

logger = get_logger(__name__)

T = TypeVar("T")

#: Seconds between two looks at parked (due, but unroutable) messages: after a rescue, and at most.
SHORTEST_LOOK_SECONDS = 1.0
LONGEST_LOOK_SECONDS = 30.0

#: Number of early tasks put back with one wait for the broker's confirms. A quorum queue's client
#: delays acknowledgements beyond 32. If the worker then stops, the broker redelivers these tasks.
BATCH = 32

#: The least time between two looks at the management API, as a multiple of the time that a look
#: takes: a broker with thousands of queues, and hundreds of workers, has other work to do.
_LEAST_PAUSES = 50

#: Seconds until the next request to a management API that did not answer.
_UNAVAILABLE_SECONDS = 600.0

_RETRY_SECONDS = 1.0
_TRIES = 3

#: py-amqp raises AttributeError on a lost connection.
_ERRORS = (AMQPError, KombuError, OSError, AttributeError)


@dataclass(frozen=True)
class Task:
    """A task that a worker received before its due time.

    The :class:`Attendant` publishes the task again, and then calls *done*. If the publish fails,
    the :class:`Attendant` calls *instead*.
    """

    wait: Wait
    done: Callable[[], Any]
    instead: Callable[[], Any]

    @property
    def is_connected(self) -> bool:
        return self.wait.message.channel.connection is not None


class Attendant(Thread):
    """A thread that returns early tasks to the broker, and publishes unroutable messages again."""

    def __init__(self, app: Any, settings: DelaySettings) -> None:
        super().__init__(name="native-delay-attendant", daemon=True)
        self.settings = settings
        self._app = app
        self._connection: Any = None
        self._errors: tuple[type[BaseException], ...] = _ERRORS
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._stopping = Event()
        self._look_seconds = SHORTEST_LOOK_SECONDS
        self._next_look = monotonic()
        #: True before the first look, and after a new binding.
        self._looks_at_once = True
        self._next_watch = monotonic()
        self._told: set[str] = set()
        self._warned = False

    # --- called from the consumer's thread ----------------------------------------------

    def put_back(self, wait: Wait, done: Callable[[], Any], instead: Callable[[], Any]) -> bool:
        """Let the attendant thread publish a message that must wait in the broker.

        Returns False if the thread is stopping. The thread calls *done* after the broker's
        confirm, or *instead* after a failure.
        """
        if self._stopping.is_set():
            return False
        self._tasks.put(Task(wait, done, instead))
        return True

    def look_for_parked(self) -> None:
        """Publish unroutable messages again now, because a queue may have been bound."""
        self._looks_at_once = True
        self._next_look = monotonic()
        self._tasks.put(None)

    def stop(self) -> None:
        """Make the thread end soon. The broker redelivers the remaining messages."""
        self._stopping.set()
        self._tasks.put(None)

    # --- the thread ----------------------------------------------------------------------

    def run(self) -> None:
        self._guarded(self._log_dangers)
        while not self._stopping.is_set():
            batch = self._take_batch()
            if batch:
                self._put_back_or_hold(batch)
            if monotonic() >= self._next_look and not self._stopping.is_set():
                self._guarded(self._watch_queues)
                self._guarded(self._rescue)
        self._disconnect()

    def _take_batch(self) -> list[Task]:
        """Wait for early tasks, and return up to 32 of these tasks."""
        batch: list[Task] = []
        timeout: float = max(self._next_look - monotonic(), 0.0)
        while len(batch) < BATCH:
            try:
                task = self._tasks.get(timeout=timeout) if timeout else self._tasks.get_nowait()
            except Empty:
                break
            if task is None:
                break
            batch.append(task)
            timeout = 0.0
        return batch

    def _put_back_or_hold(self, batch: list[Task]) -> None:
        for attempt in range(_TRIES):
            batch = [task for task in batch if task.is_connected]
            left = self._guarded(partial(self._put_back, batch))
            batch = batch if left is None else left
            if not batch:
                return
            if self._stopping.wait(_RETRY_SECONDS * (attempt + 1)):
                return
        for task in batch:
            logger.warning("native delay: cannot put a task back, the worker keeps it in memory")
            task.instead()

    def _put_back(self, batch: Sequence[Task]) -> list[Task]:
        """Put tasks back; return those that must be tried again, on a new connection."""
        if not batch:
            return []
        results = self._part().put_back([task.wait for task in batch])
        again, error = [], None
        for task, result in zip(batch, results, strict=True):
            match result:
                case None:
                    task.done()
                case NativeDelayError():
                    logger.warning("native delay: the worker keeps a task in memory: %s", result)
                    task.instead()
                case _:
                    again.append(task)
                    error = result
        logger.debug("native delay: put back %d early task(s)", results.count(None))
        if error is not None:
            self._failed(error)
        return again

    def _rescue(self) -> None:
        part = self._part()
        at_once, self._looks_at_once = self._looks_at_once, False
        try:
            outcome = part.rescue() if at_once else part.rescue_in_turn()
        except NotPermitted as exc:
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            logger.log(level, "native delay: this worker rescues no parked messages: %s", exc)
            outcome = None
        if outcome is None:
            self._look_seconds = LONGEST_LOOK_SECONDS / 2
        elif outcome.rescued:
            logger.info("native delay: %s", outcome)
            self._look_seconds = SHORTEST_LOOK_SECONDS
        elif outcome.still_parked:
            self._look_seconds = min(self._look_seconds * 2, LONGEST_LOOK_SECONDS)
        else:
            self._look_seconds = LONGEST_LOOK_SECONDS
        self._next_look = monotonic() + self._look_seconds
        with suppress(StoreUnavailable):  # the gates log it
            part.sweep()

    def _watch_queues(self) -> None:
        if monotonic() < self._next_watch:
            return
        part, began = self._part(), monotonic()
        try:
            for said in part.watch_queues():
                if said not in self._told:
                    self._told.add(said)
                    logger.warning("native delay: %s", said)
            pause_seconds = _LEAST_PAUSES * (monotonic() - began)
            self._next_watch = monotonic() + max(LONGEST_LOOK_SECONDS / 2, pause_seconds)
        except ManagementUnavailable as exc:
            logger.debug("native delay: full queues not looked for: %s", exc)
            self._next_watch = monotonic() + _UNAVAILABLE_SECONDS

    def _log_dangers(self) -> None:
        for finding in self._part().dangers():
            if finding.level == WRONG:
                logger.warning("native delay: %s", finding)

    def _guarded(self, step: Callable[[], T]) -> T | None:
        """Return the result of *step*; None after an error."""
        try:
            return step()
        except Exception as exc:  # no message may end the thread
            self._failed(exc)
            return None

    def _failed(self, exc: Exception) -> None:
        """Log an error, and close the connection."""
        expected = isinstance(exc, (NativeDelayError, *self._errors))
        if not self._stopping.is_set():
            logger.warning("native delay: %s", described(exc), exc_info=None if expected else exc)
        self._next_look = monotonic() + LONGEST_LOOK_SECONDS / 10
        self._disconnect()

    def _part(self) -> WorkerPart:
        if self._connection is None:
            # Confirms also for a task that has become due and is published without a delay.
            self._connection = self._app.connection_for_write(
                transport_options={"confirm_publish": True}
            )
            transport = self._connection.transport
            self._errors = (*_ERRORS, *transport.connection_errors, *transport.channel_errors)
        self._connection.ensure_connection(max_retries=1)
        part: WorkerPart = self._connection.default_channel.worker_part(self.settings)
        return part

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*self._errors):
                connection.close()
