"""The numbers that ``delay status`` shows for Redis and databases. This module does no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ..durations import duration
from ..errors import NativeDelayError
from ..finding import WRONG, Finding

#: A message overdue for so many seconds means that no promoter moves due messages, or it is stuck.
PATIENCE_SECONDS = 15.0

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
        return cls(
            name,
            census.waiting,
            None if until_us is None else max(until_us, 0) / 1_000_000,
            census.overdue,
            max(-(until_us or 0), 0) / 1_000_000,
            census.parked,
            census.promoting,
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self, table: Callable[..., str]) -> list[str]:
        due = self.next_due_within_seconds
        until = "-" if due is None else "overdue" if self.overdue else f"in {duration(due)}"
        late = f", the first for {duration(self.overdue_seconds)}" if self.overdue else ""
        return [
            f"waiting   {self.waiting}",
            f"next due  {until}",
            f"overdue   {self.overdue}{late}",
            f"parked    {self.parked}",
        ]

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
    """Raise NativeDelayError if messages wait or are parked."""
    if census.waiting or census.parked:
        raise NativeDelayError(
            f"{name}: {census.waiting} message(s) wait and {census.parked} are parked: run this "
            f"again"
        )
