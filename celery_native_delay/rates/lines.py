"""Lines of rated tasks, as workers and people ask the state that keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from .rate import Rate


@dataclass(frozen=True)
class RateLine:
    """A line of tasks: those of one *task* with one *key*, which start at one *rate*.

    *key* is None for the one line of a task. *waiting* are the places in it that are not used yet;
    that of a task which was cancelled counts until its turn. *next_slot_us* is when the next task
    may start, None if none waits, and *held_until_us* when a hold ends, None without one; in
    microseconds since the epoch. *starts_last_period* is exact to the place in a period, and
    *utilisation* that over what the rate allows.
    """

    task: str
    key: str | None
    rate: str
    waiting: int
    next_slot_us: int | None
    starts_last_period: int
    utilisation: float
    held_until_us: int | None

    def as_json(self) -> dict[str, Any]:
        """Plain data for ``--json`` and for Flower's REST."""
        return {
            "task": self.task,
            "key": self.key,
            "rate": self.rate,
            "waiting": self.waiting,
            "next_slot": _iso(self.next_slot_us),
            "starts_last_period": self.starts_last_period,
            "utilisation": round(self.utilisation, 4),
            "held_until": _iso(self.held_until_us),
        }


def _iso(moment_us: int | None) -> str | None:
    if moment_us is None:
        return None
    moment = datetime.fromtimestamp(moment_us / 1_000_000, UTC)
    return moment.isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Turn:
    """A line's answer to a task: it starts now, or waits *wait_us* in its *place*."""

    wait_us: int = 0
    place: int | None = None

    @property
    def starts(self) -> bool:
        """True if the task is to start now, which is counted."""
        return self.place is None


class Lines(Protocol):
    """The state of all lines. Every method raises RecordsUnavailable while it is away."""

    def ask(
        self, task: str, key: str | None, rate: Rate, place: int | None, *, may_start: bool = True
    ) -> Turn:
        """The turn of a task in its line; *place* is the one that it has, None for a newcomer.

        A newcomer that may not start gets a place only.
        """

    def hold(self, task: str, key: str | None, rate: Rate, seconds: float) -> int:
        """Let nothing of a line start for *seconds*; the place in front of all others."""

    def look(self, limit: int) -> Sequence[RateLine]:
        """The *limit* lines that are the longest in time, those with most waiting first."""

    def close(self) -> None: ...
