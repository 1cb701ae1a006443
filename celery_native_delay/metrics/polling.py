"""A thread that regularly reads the counts of waiting messages from the broker."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic, time
from typing import Any

from celery import Celery
from celery.utils.log import get_logger

from ..app.broker import bounded_connection, opened
from ..app.delay import Delay
from ..app.installation import admin_part, delaying_channel
from ..app.schedules import Scheduled, Schedules
from ..errors import NativeDelayError, described
from ..rates.line import RateLine
from ..records.holds import Hold
from ..records.waiting import HELD_FROM_US
from ..transports.interface import Backlog

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


class Poll(Thread):
    """Thread that regularly counts the waiting messages on the broker of *app*."""

    def __init__(self, app: Celery, *, every_seconds: float) -> None:
        super().__init__(name="native-delay-poll", daemon=True)
        self._app = app
        self._every_seconds = every_seconds
        self._connection: Any = None
        self._stopping = Event()
        self._last: Reading | None = None
        self._warned = False

    def reading(self) -> Reading | None:
        """Return the last reading, with None for all counts if the next reading is overdue."""
        last = self._last
        if last is None or monotonic() - last.read_at < self._every_seconds + PATIENCE_SECONDS:
            return last
        return Reading(None, last.read_at, last.duration_seconds)

    def stop(self) -> None:
        self._stopping.set()

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
            if not self._warned:
                self._warned = True
                logger.warning(
                    "native delay: cannot count the waiting messages: %s", described(exc)
                )
            return Reading(None, monotonic(), monotonic() - begin)
        if self._warned:
            self._warned = False
            logger.info("native delay: counts the waiting messages again")
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
