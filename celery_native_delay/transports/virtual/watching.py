"""Signs that something hands over what is due: promoters show them, producers look for them.

A promoter (of a store: a dispatcher) leaves a sign that ends by itself, and renews it every some
seconds, whatever it hands over. A producer that finds neither the sign nor that things are handed
over in time knows that none runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from .status import PATIENCE_SECONDS, Status

logger = logging.getLogger(__name__)

#: Seconds for which a sign is good.
SHOWN_SECONDS = 30

#: Seconds between two signs of one promoter, which may sleep for as long before it looks again.
SHOW_SECONDS = 10.0

#: Seconds between two looks of one process.
LOOK_SECONDS = 60.0


class Sign:
    """The sign of one promoter: *show* tells others of it."""

    def __init__(self, show: Callable[[], object], *errors: type[Exception]) -> None:
        """*errors* of *show* keep it from nothing."""
        self._show = show
        self._errors = errors
        self._next_at = 0.0

    def keep_up(self) -> None:
        """Show it again if that is due; else it takes no time."""
        now = monotonic()
        if now < self._next_at:
            return
        self._next_at = now + SHOW_SECONDS
        try:
            self._show()
        except self._errors as exc:
            logger.debug("native delay: this promoter cannot show that it runs: %s", exc)


#: When a process looks next, by the place where messages wait; never again once it has warned.
_next_looks: dict[str, float] = {}


def warn_if_nothing_promotes(place: str, look: Callable[[], Status]) -> None:
    """Warn once in a process that messages are overdue in *place* and no promoter shows itself.

    Called with every delayed publish, when the message is safe; looks once a minute, and never
    fails: a producer that may not look, or finds no server, has published all the same.
    """
    now = monotonic()
    if now < _next_looks.get(place, 0.0):
        return
    _next_looks[place] = now + LOOK_SECONDS
    with suppress(Exception):
        status = look()
        if not status.promoting and status.overdue_seconds > PATIENCE_SECONDS:
            _next_looks[place] = float("inf")
            logger.warning("native delay: %s", status.findings()[0])
