"""What the command line tells of a store that workers hand over from. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ...core.durations import duration
from ..contract import Backlog

#: Longer overdue, in seconds, and nobody seems to hand over.
_PATIENCE_SECONDS = 15.0


class Census(Protocol):
    """How much there is, at one instant, as numbers of messages."""

    @property
    def waiting(self) -> int: ...

    @property
    def parked(self) -> int: ...

    @property
    def overdue(self) -> int: ...

    @property
    def until_first_us(self) -> int | None:
        """Microseconds until the first is due, below 0 since it was; None if nothing waits."""


@dataclass(frozen=True)
class Status:
    """What waits in a store; times in seconds."""

    name: str
    waiting: int
    next_due_within_seconds: float | None
    overdue: int
    overdue_seconds: float
    parked: int

    @classmethod
    def of(cls, name: str, census: Census) -> Status:
        until_us = census.until_first_us
        return cls(
            name,
            census.waiting,
            None if until_us is None else max(until_us, 0) / 1_000_000,
            census.overdue,
            max(-(until_us or 0), 0) / 1_000_000,
            census.parked,
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
            *self.differences(),
        ]

    def differences(self) -> list[str]:
        """What is wrong if nobody hands over."""
        if self.overdue_seconds <= _PATIENCE_SECONDS:
            return []
        nobody = (
            f"{self.name}: {self.overdue} message(s) overdue, the first for "
            f"{duration(self.overdue_seconds)}: no installed worker and no "
            f"`celery -A PROJ delay promote` is running"
        )
        return [nobody]


def backlog_of(census: Census) -> Backlog:
    """The same as numbers; the store itself is the ledger."""
    return Backlog(
        census.waiting,
        census.parked,
        ledger_answers=True,
        until_first_us=census.until_first_us,
        in_ledger=census.waiting,
    )
