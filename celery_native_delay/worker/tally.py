"""Numbers of what became of the delayed messages of one queue.

Counted in workers, told by an event, added up by those who listen. Pure. The event also tells how
many rated tasks were started, by task.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

#: The event's type. Its group is our own: State, Flower and celery-exporter pass it over.
EVENT = "delay-tally"

#: Upper bounds of the lateness that is counted together, in seconds.
BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0, inf)

_NAMES = ("matured", "cancelled", "expired")


@dataclass
class Tally:
    """Messages that *matured* and were received to be run, that were *cancelled*, and *expired*.

    *late* counts those that started, by :data:`BOUNDS`; *late_seconds* is their lateness in all.
    """

    matured: int = 0
    cancelled: int = 0
    expired: int = 0
    late: list[int] = field(default_factory=lambda: [0] * len(BOUNDS))
    late_seconds: float = 0.0

    def start(self, late_seconds: float) -> None:
        """Count one that started so long after it was due; before is as good as at the time."""
        late_seconds = max(late_seconds, 0.0)
        self.late[bisect_left(BOUNDS, late_seconds)] += 1
        self.late_seconds += late_seconds

    def add(self, other: Tally) -> None:
        """Count what *other* has counted."""
        self.matured += other.matured
        self.cancelled += other.cancelled
        self.expired += other.expired
        self.late = [mine + more for mine, more in zip(self.late, other.late, strict=True)]
        self.late_seconds += other.late_seconds

    def as_fields(self) -> dict[str, Any]:
        """The fields of the event; bounds are named, another release may have others."""
        late = {str(bound): n for bound, n in zip(BOUNDS, self.late, strict=True) if n}
        numbers = {name: getattr(self, name) for name in _NAMES}
        return numbers | {"late": late, "late_seconds": round(self.late_seconds, 6)}

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> Tally:
        """A tally from an event; what is late by a bound that we do not have counts for the next.

        TypeError, ValueError, AttributeError: these are no such fields.
        """
        matured, cancelled, expired = (count_of(fields.get(name, 0)) for name in _NAMES)
        tally = cls(matured, cancelled, expired)
        for bound, number in fields.get("late", {}).items():
            tally.late[bisect_left(BOUNDS, float(bound))] += count_of(number)
        tally.late_seconds = float(fields.get("late_seconds", 0.0))
        if not 0 <= tally.late_seconds < inf:
            raise ValueError(f"expected seconds, got {tally.late_seconds}")
        return tally


def count_of(number: Any) -> int:
    """A count from an event; or ValueError."""
    if not isinstance(number, int) or number < 0:
        raise ValueError(f"expected a number of messages, got {number!r}")
    return number
