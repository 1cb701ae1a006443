"""The two threads of the metrics: one asks the broker, one hears the workers' counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import dataclass
from threading import Event, Lock, Thread
from time import monotonic, time
from typing import Any

from celery import Celery
from celery.events.receiver import EventReceiver
from celery.utils.log import get_logger

from ..app.broker import bounded_connection, opened
from ..app.delay import Delay
from ..app.installation import admin_part, delaying_channel
from ..app.schedules import Scheduled, Schedules
from ..backoff import Backoff
from ..errors import NativeDelayError, described
from ..rates.line import RateLine
from ..records.holds import Hold
from ..records.waiting import HELD_FROM_US
from ..transports.interface import Backlog
from ..worker.tally import EVENT, counts_of

logger = get_logger(__name__)

#: If the next reading is late by this many seconds, the last reading is dropped.
PATIENCE_SECONDS = 10.0

#: The largest number of lines to read. A line is the waiting tasks with the same rate and key.
MOST_LINES = 10_000


@dataclass(frozen=True)
class Reading:
    """Values that the thread :class:`Poll` read; None stands for an unknown value."""

    #: The message counts on the broker.
    backlog: Backlog | None
    #: The time of the reading, by the monotonic clock.
    read_at: float
    duration_seconds: float
    #: The Unix time at which the first waiting message is due.
    first_due: float | None = None
    lines: tuple[RateLine, ...] | None = None
    entries: tuple[Scheduled, ...] | None = None
    holds: tuple[Hold, ...] = ()


class Counts:
    """Sums of workers' counts: received messages by queue, started rate-limited tasks by name."""

    def __init__(self, queues: Iterable[str] = (), rated: Iterable[str] = ()) -> None:
        self._lock = Lock()
        self._by_queue: dict[str, Counter[str]] = {queue: Counter() for queue in queues}
        self._starts = Counter(dict.fromkeys(rated, 0))
        self._warned = False

    def hear(self, event: Mapping[str, Any]) -> None:
        """Add a worker's counts from a ``delay-tally`` event; log only the first invalid event."""
        try:
            tallies = {queue: counts_of(fields) for queue, fields in event["queues"].items()}
            starts = counts_of(event.get("rate_starts", {}))
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "native delay: ignores an invalid delay-tally event of %s: %r",
                    event.get("hostname"),
                    exc,
                )
            return
        with self._lock:
            for queue, tally in tallies.items():
                self._by_queue.setdefault(queue, Counter()).update(tally)
            self._starts.update(starts)

    def so_far(self) -> dict[str, Counter[str]]:
        with self._lock:
            return deepcopy(self._by_queue)

    def starts(self) -> dict[str, int]:
        """Return the number of started rate-limited tasks, by task name."""
        with self._lock:
            return dict(self._starts)


class _MetricsThread(Thread):
    """A thread that warns once of each outage of its broker."""

    #: What the thread can, or cannot do, for the log.
    does: str

    def __init__(self, app: Celery) -> None:
        super().__init__(name=f"native-delay-{type(self).__name__.lower()}", daemon=True)
        self._app = app
        self._stopping = Event()
        self._warned = False

    def stop(self) -> None:
        self._stopping.set()

    def _fails(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("native delay: cannot %s: %s", self.does, described(error))

    def _works(self) -> None:
        if self._warned:
            self._warned = False
            logger.info("native delay: can %s again", self.does)


class Poll(_MetricsThread):
    """Thread that regularly counts the waiting messages on the broker of *app*."""

    does = "count the waiting messages"

    def __init__(self, app: Celery, *, every_seconds: float) -> None:
        super().__init__(app)
        self._every_seconds = every_seconds
        self._connection: Any = None
        self._last: Reading | None = None

    def reading(self) -> Reading | None:
        """Return the last reading, with None for all counts if the next reading is overdue."""
        last = self._last
        if last is None or monotonic() - last.read_at < self._every_seconds + PATIENCE_SECONDS:
            return last
        return Reading(None, last.read_at, last.duration_seconds)

    def run(self) -> None:
        while True:
            self._last = self._look()
            if self._stopping.wait(self._every_seconds):
                break
        self._disconnect()

    def _look(self) -> Reading:
        begin = monotonic()
        try:
            connection = self._opened()
            backlog = admin_part(self._app, connection).backlog()
            lines, entries = self._lines(connection), self._entries(connection)
            holds = self._holds()
        except Exception as exc:  # no error of the broker may end the thread
            self._disconnect()
            self._fails(exc)
            return Reading(None, monotonic(), monotonic() - begin)
        self._works()
        first_us = backlog.until_first_us
        first_due = None if first_us is None else time() + first_us / 1_000_000
        if first_due is not None and first_due * 1_000_000 >= HELD_FROM_US:
            first_due = None
        return Reading(backlog, monotonic(), monotonic() - begin, first_due, lines, entries, holds)

    def _opened(self) -> Any:
        if self._connection is None:
            self._connection = bounded_connection(self._app)
        return opened(self._app, self._connection)

    def _lines(self, connection: Any) -> tuple[RateLine, ...] | None:
        channel, settings = delaying_channel(self._app, connection)
        if not settings.rates:
            return None
        with suppress(NativeDelayError), closing(channel.lines(settings)) as lines:
            return tuple(lines.look(MOST_LINES))
        return None

    def _entries(self, connection: Any) -> tuple[Scheduled, ...] | None:
        _, settings = delaying_channel(self._app, connection)
        if not settings.schedules:
            return None
        with suppress(NativeDelayError):
            return tuple(Schedules(self._app, connection))
        return None

    def _holds(self) -> tuple[Hold, ...]:
        with suppress(NativeDelayError):
            return tuple(hold for hold in Delay(self._app).holds() if hold.mode != "RetryAfter")
        return ()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # the connection may be lost or never opened
                connection.collapse()


class Listener(_MetricsThread):
    """Thread that receives the workers' counts of delayed messages (``delay-tally`` events).

    On RabbitMQ, the binding key ``delay.#`` excludes all other events.
    """

    does = "receive the workers' events"

    def __init__(self, app: Celery, counts: Counts) -> None:
        super().__init__(app)
        self._counts = counts
        self._receiver: Any = None
        self._backoff = Backoff(1.0, 30.0)
        self.is_connected = False

    def stop(self) -> None:
        super().stop()
        if self._receiver is not None:
            self._receiver.should_stop = True

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except Exception as exc:  # no error of the broker may end the thread
                self.is_connected = False
                if self._stopping.is_set():
                    return
                self._fails(exc)
                self._stopping.wait(self._backoff.failed())

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0)
            self._receiver = EventReceiver(
                connection,
                handlers={EVENT: self._counts.hear},
                routing_key="delay.#",
                app=self._app,
            )
            # Celery's own method would only wake up the workers, which wakeup=False turns off.
            self._receiver.on_consume_ready = self._is_ready
            self._receiver.should_stop = self._stopping.is_set()
            self._receiver.capture(limit=None, timeout=None, wakeup=False)

    def _is_ready(self, *_: Any, **__: Any) -> None:
        self.is_connected = True
        self._works()
        self._backoff.reset()
