"""Heartbeats of the processes that move due messages.

A producer logs a warning if messages are overdue and no process has a fresh heartbeat.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from ..errors import errors_ignored
from .status import PATIENCE_SECONDS, Status

logger = logging.getLogger(__name__)

#: How many seconds a heartbeat is valid.
SHOWN_SECONDS = 30

#: Seconds between two heartbeats of a promoter, which may sleep that long.
SHOW_SECONDS = 10.0

#: Seconds between two checks of a producer.
LOOK_SECONDS = 60.0


class Sign:
    """Writes the heartbeat of a process that moves due messages to queues."""

    def __init__(self, show: Callable[[], object], *errors: type[Exception]) -> None:
        """*show* writes the heartbeat. Exceptions of the types *errors* are only logged."""
        self._show = show
        self._errors = errors
        self._next_at = 0.0

    def keep_up(self) -> None:
        """Write this process's heartbeat if the last heartbeat is at least ten seconds old."""
        now = monotonic()
        if now < self._next_at:
            return
        self._next_at = now + SHOW_SECONDS
        try:
            self._show()
        except self._errors as exc:
            logger.debug("native delay: this promoter cannot write its heartbeat: %s", exc)


#: The time of the next check, by the place where messages wait; infinite after a warning.
_next_looks: dict[str, float] = {}


def warn_if_nothing_promotes(place: str, look: Callable[[], Status]) -> None:
    """Log a warning if messages are overdue and no process moves due messages.

    Every delayed publish calls this function. For each *place* (a Redis or database), the function
    calls *look* at most once a minute, and never again after a warning.
    """
    now = monotonic()
    if now < _next_looks.get(place, 0.0):
        return
    _next_looks[place] = now + LOOK_SECONDS
    with errors_ignored():  # the message is already published
        status = look()
        if not status.promoting and status.overdue_seconds > PATIENCE_SECONDS:
            _next_looks[place] = float("inf")
            logger.warning("native delay: %s", status.findings()[0])
