"""The holds and drops of tasks, and their text in the state of a store. Pure: no I/O, no clock."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal

from ..due_time import told
from ..errors import InvalidQuery, TopologyMismatch
from .interface import RecordName
from .search import parse
from .waiting import HELD_FROM_US, Waiting

#: The one record with all holds.
RECORD = RecordName("hold", "all")

#: The record stays for so many microseconds after its last change: a century.
KEPT_US = 100 * 365 * 86_400_000_000

MOST_HOLDS = 40

#: Each hold without an end has its own range of due times, a year long, in which tasks keep their
#: order by the due time before. So the range counts them, and a release finds the oldest first.
_RANGE_US = 365 * 86_400_000_000

#: The edges of these ranges, for ``WaitingTasks.counts``.
EDGES_US = [HELD_FROM_US + number * _RANGE_US for number in range(MOST_HOLDS * 2 + 1)]

#: A server's clock may differ from the worker's by this many microseconds.
_SKEW_US = 60_000_000

_VERSION = "1"


@dataclass(frozen=True)
class Hold:
    """A hold or drop of tasks.

    - *task*: the name of the tasks, or a pattern such as ``shop.*``.
    - *key*: only tasks with this key of a rate, debounce, throttle or unique; None: all.
    - *search*: only tasks that match this search text; "": all.
    - *mode*: "hold" or "drop". "release" while tasks get their new due times, "ended" if some are
      left from an earlier hold, "RetryAfter" for the pause of a rate limit.
    - *by*: who called, such as "ada@web1".
    - *since_us*, *until_us*: start and end in microseconds since the epoch; None: unknown, or none.
    - *held*: the number of tasks that wait because of it; with an end, counted up to 10,000.
    - *place*: the number of its range of due times.
    - *next_us*: the due time of the next task that a release with a rate lets go.
    """

    task: str
    key: str | None = None
    search: str = ""
    mode: Literal["hold", "drop", "release", "ended", "RetryAfter"] = "hold"
    by: str = ""
    since_us: int | None = None
    until_us: int | None = None
    held: int = 0
    place: int = 0
    next_us: int = 0

    @property
    def name(self) -> str:
        """The task with key and search: what names a hold in the commands."""
        key = "" if self.key is None else f" --key {self.key}"
        return f"{self.task}{key}{self.search and f' --search {self.search}'}"

    @property
    def stops(self) -> bool:
        """True if tasks do not start because of it."""
        return self.mode in ("hold", "drop")

    def concerns(self, task: str, now_us: int) -> bool:
        """Return True if this stops tasks of this name at the time *now_us*."""
        return self.stops and not self.is_over(now_us) and fnmatchcase(task, self.task)

    def is_over(self, now_us: int) -> bool:
        return self.until_us is not None and self.until_us <= now_us

    def matches(self, task: Waiting, keys: Collection[str | None]) -> bool:
        """Return True for a task with one of *keys* if key and search fit. Its name must fit."""
        has_key = self.key is None or self.key in keys
        return has_key and all(word.matches(task) for word in parse(self.search))

    def due_us(self, was_us: int) -> int:
        """Return when a held task is due that was due at *was_us*, in microseconds."""
        ahead_us = was_us - (self.since_us or 0)
        if self.until_us is not None:  # in their order, within thousandths of the hold's length
            return self.until_us + max(ahead_us, 0) // 1000
        middle_us = HELD_FROM_US + self.place * _RANGE_US + _RANGE_US // 2
        return middle_us + max(1 - _RANGE_US // 2, min(ahead_us, _RANGE_US // 2 - 1))

    @property
    def range_us(self) -> tuple[int, int]:
        """The range of due times in which the held tasks are, in microseconds since the epoch."""
        if self.until_us is None:
            return EDGES_US[self.place], EDGES_US[self.place + 1]
        longest_us = (self.until_us - (self.since_us or 0)) // 1000
        return self.until_us - _SKEW_US, self.until_us + longest_us + _SKEW_US

    def as_json(self) -> dict[str, Any]:
        """Return the hold as a dict, for the option ``--json`` and for Flower's REST API."""
        return {
            "name": self.name,
            "task": self.task,
            "key": self.key,
            "search": self.search,
            "mode": self.mode,
            "by": self.by,
            "since": None if self.since_us is None else told(self.since_us),
            "until": None if self.until_us is None else told(self.until_us),
            "held": self.held,
        }


def free_place(holds: Sequence[Hold], counts: Sequence[int]) -> int:
    """Return a place that no hold and no held task uses. Raises InvalidQuery if there is none."""
    used = {hold.place for hold in holds}
    for place, count in enumerate(counts):
        if place not in used and not count and len(used) < MOST_HOLDS:
            return place
    raise InvalidQuery(
        f"expected at most {MOST_HOLDS} holds: release some, or hold tasks by a pattern (shop.*)"
    )


def encoded(holds: Sequence[Hold]) -> str | None:
    """Encode the holds as the text of :data:`RECORD`; None without a hold."""
    texts = [[getattr(hold, field.name) for field in fields(Hold)] for hold in holds]
    return f"{_VERSION}\n{json.dumps(texts)}" if texts else None


def decoded(text: str | None) -> list[Hold]:
    """Decode the text of :data:`RECORD`. Raises TopologyMismatch if a later release wrote it."""
    version, _, texts = (text or f"{_VERSION}\n[]").partition("\n")
    if version != _VERSION:
        raise TopologyMismatch(
            f"expected holds of version {_VERSION}, got {version}: update this package here"
        )
    return [Hold(*values) for values in json.loads(texts)]
