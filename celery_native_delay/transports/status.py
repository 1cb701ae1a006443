"""The numbers that ``delay status`` shows for Redis and databases.

A producer logs a warning if messages are overdue and no process has a fresh heartbeat.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from ..durations import duration
from ..errors import NativeDelayError, errors_ignored
from ..finding import WRONG, Finding
from ..now import time_ns
from ..records.waiting import HELD_FROM_US
from .interface import Told

logger = logging.getLogger(__name__)

#: A message overdue for so many seconds means that no promoter moves due messages, or it is stuck.
PATIENCE_SECONDS = 15.0

#: Seconds between two checks of a producer.
LOOK_SECONDS = 60.0

NOTHING_PROMOTES = (
    "nothing promotes: no installed worker and no `celery -A PROJ delay promote` is running"
)
_WAY_OUT = (
    "start an installed worker or, where all workers are plain ones, run "
    "`celery -A PROJ delay promote` beside them"
)


@dataclass(frozen=True)
class Status:
    """The numbers that ``delay status`` shows for Redis or a database."""

    name: str
    waiting: int
    next_due_within_seconds: float | None
    overdue: int
    overdue_seconds: float
    parked: int
    promoting: bool

    @classmethod
    def of(cls, name: str, census: Any) -> Status:
        until_us = census.until_first_us
        if until_us is not None and time_ns() // 1000 + until_us >= HELD_FROM_US:
            until_us = None
        return cls(
            name,
            census.waiting,
            None if until_us is None else max(until_us, 0) / 1_000_000,
            census.overdue,
            max(-(until_us or 0), 0) / 1_000_000,
            census.parked,
            census.promoting,
        )

    def told(self) -> Told:
        due = self.next_due_within_seconds
        until = "-" if due is None else "overdue" if self.overdue else f"in {duration(due)}"
        late = f", the first for {duration(self.overdue_seconds)}" if self.overdue else ""
        lines = [
            f"waiting   {self.waiting}",
            f"next due  {until}",
            f"overdue   {self.overdue}{late}",
            f"parked    {self.parked}",
        ]
        return Told(asdict(self), lines, self.findings())

    def findings(self) -> list[Finding]:
        """Report problems, such as overdue messages."""
        found = []
        late = (
            f"{self.overdue} message(s) overdue, the first for {duration(self.overdue_seconds)}"
            if self.overdue
            else f"{self.waiting} message(s) waiting"
        )
        if not self.promoting:
            problem = f"{self.name}: {late}, and {NOTHING_PROMOTES}"
            found.append(Finding("promoting", WRONG, problem, _WAY_OUT))
        elif self.overdue_seconds > PATIENCE_SECONDS:
            problem = f"{self.name}: {late}, although a promoter runs"
            way_out = "look at the log of the workers, or of `delay promote`"
            found.append(Finding("promoting", WRONG, problem, way_out))
        if self.parked:
            found.append(parked_finding(self.parked, "their destination rejects them"))
        return found


def parked_finding(number: int, why: str) -> Finding:
    """Report the number of due but undeliverable messages, and *why* they are undeliverable."""
    return Finding(
        "parked",
        WRONG,
        f"{number} message(s) are parked: they were due, and {why}",
        "see `celery -A PROJ delay parked list` and repair their destinations; then workers "
        "deliver them",
    )


def refuse_waiting(name: str, census: Any) -> None:
    """Raise NativeDelayError if messages wait, are being published, or are parked."""
    waiting = census.waiting + census.taken
    if waiting or census.parked:
        raise NativeDelayError(
            f"{name}: {waiting} message(s) wait and {census.parked} are parked: run this again"
        )


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
