"""Computes when rate-limited tasks may start. This module does no I/O.

A *line* is the queue of waiting tasks with the same rate limit and key. All times are in
microseconds.

The message of each waiting task contains a *place*: the number of the task in its line. The first
waiting task may start at the time ``start_at - ahead``; the rate's burst permits the start *ahead*
microseconds early. The task with the next place may start one *spacing* later, and so on. All
these times depend on ``start_at`` and *spacing*. So an outage, a ``RetryAfter`` or a changed rate
moves the times of all waiting tasks.

Before each start two conditions are checked:

- The pace follows the generic cell rate algorithm (GCRA). ``start_at`` is the theoretical arrival
  time of GCRA. This time may be a little in the past, so that tasks catch up after late starts.
- The number of starts within the last period is below the limit.

Therefore redelivered messages and messages without a place cannot break the rate limit.

``in_redis.py`` has the same arithmetic in Lua, and a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

from ..due_time import told
from ..texts import is_text
from .rate import MOST_KEPT_STARTS, UNLIMITED, Rate

T = TypeVar("T")

#: The version at the beginning of every record. A change in the record needs a new one.
VERSION = 2

#: The state of a line is stored for one period and a minute after the start time of its last task.
KEPT_US = 60_000_000

#: A rate that was set by ``Delay.set_rate`` is kept for a hundred years.
SET_KEPT_US = 100 * 365 * 86_400_000_000

#: The separator between task and key in the name of a line.
_SEPARATOR = "\n"


@dataclass(frozen=True)
class RateLine:
    """The state of a rate limit for one key; times are in microseconds since the epoch.

    - *task*: the name of the rate, by default the task's name
    - *key*: the key, or None for tasks without a key
    - *rate*: the limit as text
    - *waiting*: the number of waiting tasks, including cancelled tasks
    - *next_slot_us*: the time of the next start, or None if no task waits
    - *starts_last_period*: the approximate number of tasks started in the last period
    - *utilisation*: *starts_last_period* divided by the limit
    - *held_until_us*: the end of a pause after ``RetryAfter``, or None
    - *overridden*: True if the limit of the key differs from the rate in the settings
    """

    task: str
    key: str | None
    rate: str
    waiting: int
    next_slot_us: int | None
    starts_last_period: int
    utilisation: float
    held_until_us: int | None
    overridden: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the state as a dict for JSON, with times in ISO 8601."""
        found = {
            name.removesuffix("_us"): told(value) if value and name.endswith("_us") else value
            for name, value in vars(self).items()
        }
        return found | {"utilisation": round(self.utilisation, 4)}


@dataclass(frozen=True)
class Turn:
    """The decision whether a task may start now, or must wait for one of its rate limits.

    - *wait_us*: the microseconds until the task may start
    - *place*: the task's place in the line of that rate limit; None if the task may start now
    - *at*: the index of that rate limit in the task's list of limits
    """

    wait_us: int = 0
    place: int | None = None
    at: int = 0

    @property
    def starts(self) -> bool:
        return self.place is None


class Asked(NamedTuple):
    """One rate limit of a task, and the task's *place* in its line; None: the task has no place."""

    name: str
    key: str | None
    rate: Rate
    place: int | None = None

    @property
    def line(self) -> str:
        """The name of the line for this limit and key."""
        return name_of(self.name, self.key)


class Line(NamedTuple):
    """The stored state of a line of waiting tasks, with times in microseconds since the epoch.

    - *front*, *end*: the place of the first waiting task, and the place after the last task
    - *start_at*: the time at which the next start is exactly on pace
    - *held_until*: no task starts before this time
    - *counted_from*: the time at which the current period began
    - *starts*, *starts_before*: the number of starts in this period, and in the period before
    - *total*: the number of starts since the last change of the rate
    - *is_set*: 1 if ``Delay.set_rate`` has set the rate
    - *log*: the times of the last starts; at high rates, of every n-th start
    """

    front: int = 0
    end: int = 0
    start_at: int = 0
    held_until: int = 0
    counted_from: int = 0
    starts: int = 0
    starts_before: int = 0
    total: int = 0
    is_set: int = 0
    log: tuple[int, ...] = ()

    def ask(
        self, rate: Rate, now_us: int, place: int | None, *, may_start: bool = True
    ) -> tuple[Self, Turn]:
        """Decide whether a rate-limited task may start; return the new state and decision.

        :meth:`.Lines.ask` describes *place* and *may_start*.
        """
        line = self
        if line.front >= line.end:  # no task waits
            line = line._replace(start_at=max(line.start_at, now_us))
        if place is None or place >= line.end:  # the record with this place was lost
            place = line.end
            line = line._replace(end=place + 1)
        slot_us = line.slot_us(rate, place)
        room_us = line.log[-rate.noted] + rate.window_us if len(line.log) >= rate.noted else 0
        if room_us > max(slot_us, now_us):  # the limit per period permits only a later start
            late_us = max(room_us - slot_us - rate.catch_up_us, 0)
            line = line._replace(start_at=line.start_at + late_us)
            slot_us = room_us
        if slot_us > now_us or not may_start:
            # Later tasks have started before a task in front: all places move back by one.
            line = line._replace(front=line.front - (place < line.front))
            return line, Turn(max(slot_us - now_us, 0), place)
        return line._start(rate, now_us, place), Turn()

    def slot_us(self, rate: Rate, place: int) -> int:
        """The time at which the task at *place* may start."""
        at_us = self.start_at - rate.ahead_us + max(place - self.front, 0) * rate.spacing_us
        return max(at_us, self.held_until)

    def _start(self, rate: Rate, now_us: int, place: int) -> Self:
        line = self._counted_until(now_us, rate.period_us)
        log, front = line.log, max(line.front, place) + 1
        pace_us = max(line.start_at, now_us - rate.catch_up_us)
        if now_us - line.start_at > max(rate.spacing_us, rate.catch_up_us):
            pace_us = now_us  # after an outage
        if line.total % rate.noted_each == 0:
            log = (*log, now_us)[-rate.noted :]
        return line._replace(
            front=front,
            end=max(line.end, front),
            start_at=pace_us + rate.spacing_us,
            starts=line.starts + 1,
            total=line.total + 1,
            log=log,
        )

    def hold(self, rate: Rate, now_us: int, wait_us: int) -> tuple[Self, int]:
        """Pause this line for *wait_us*; return the new state, and a place in front of the line.

        The task that raised ``RetryAfter`` gets this place.
        """
        held_until, place = max(self.held_until, now_us + wait_us), self.front - 1
        start_at = max(self.start_at, held_until + rate.ahead_us)
        return self._replace(front=place, start_at=start_at, held_until=held_until), place

    def without_pause(self, rate: Rate, now_us: int) -> Self:
        """End a pause after ``RetryAfter``. The starts before it still count."""
        start_at = min(self.start_at, now_us + rate.ahead_us)
        return self._replace(start_at=start_at, held_until=0)

    def changed(self, old: Rate, new: Rate, now_us: int) -> Self:
        """Return the line's state after a change of the rate. Waiting tasks keep their order.

        Starts at the *old* rate still count toward the *new* limit of starts in one period.
        """
        from_us = max(now_us, self.held_until)
        ahead_us = max(self.start_at - from_us, 0)
        # A start without a stored time counts as late as possible.
        times = [
            at_us
            for noted_us, next_us in pairwise((*self.log, now_us))
            for at_us in (noted_us, *[next_us] * (old.noted_each - 1))
        ]
        return self._replace(
            starts=0,
            starts_before=0,
            start_at=self.start_at - ahead_us + ahead_us * new.spacing_us // old.spacing_us,
            total=0,
            log=tuple(times[-new.noted_each :: -new.noted_each][:MOST_KEPT_STARTS][::-1]),
        )

    def _counted_until(self, now_us: int, period_us: int) -> Self:
        elapsed_us = now_us - self.counted_from
        if elapsed_us < period_us:
            return self
        if elapsed_us < 2 * period_us:
            return self._replace(
                counted_from=self.counted_from + period_us, starts=0, starts_before=self.starts
            )
        return self._replace(counted_from=now_us, starts=0, starts_before=0)

    def ends_us(self, rate: Rate, now_us: int) -> int:
        """The time at which the stored state of this line expires, in epoch microseconds."""
        last_us = max(self.slot_us(rate, self.end) + rate.ahead_us, now_us)
        last_us += SET_KEPT_US if self.is_set else 0
        return last_us + rate.window_us + rate.catch_up_us + KEPT_US

    def seen(self, name: str, rate: Rate, now_us: int) -> RateLine:
        task, _, key = name.partition(_SEPARATOR)
        next_us, waiting = self.slot_us(rate, self.front), self.end - self.front
        counted = self._counted_until(now_us, rate.period_us)
        ago_us = max(now_us - counted.counted_from, 0)
        starts = counted.starts + round(
            counted.starts_before * (rate.period_us - ago_us) / rate.period_us
        )
        return RateLine(
            task,
            key if _SEPARATOR in name else None,
            rate.shown,
            waiting,
            max(next_us, now_us) if waiting else None,
            starts,
            starts / rate.count,
            self.held_until if self.held_until > now_us else None,
        )

    # --- as text ---------------------------------------------------------------------------

    def encoded(self, rate: Rate) -> str:
        """Encode the state of this line as text, without the times of its last starts (*log*)."""
        return " ".join(map(str, (VERSION, *self[:-1], rate.limit, rate.burst)))

    @classmethod
    def decoded(cls, text: str | None, log: str = "") -> tuple[Self, Rate | None]:
        """Decode the state of a line, and its rate, from *text*.

        *log* has the times of the last starts, separated by spaces. If *text* is None or of another
        version, the state is empty and the rate is None.
        """
        words = (text or "").split(" ")
        if words[0] != str(VERSION):
            return cls(), None
        numbers = zip(cls._fields, map(int, words[1:-2]), strict=False)
        line = cls()._replace(**dict(numbers), log=tuple(map(int, log.split())))
        return line, _rate(words[-2], int(words[-1]))


#: A function that takes a line's state, its rate and the time in microseconds. The function returns
#: the line's new state, and an answer for the caller.
Decide: TypeAlias = Callable[[Line, Rate, int], tuple[Line, T]]


def ask_all(
    lines: Sequence[Line], asked: Sequence[Asked], now_us: int, *, may_start: bool = True
) -> tuple[list[Line], Turn]:
    """Decide if a task with several rate limits may start; return the new states and the decision.

    *lines* has the state of the line for each limit in *asked*. If all limits permit the start, all
    lines change. Otherwise only the line in which the task waits changes.
    """
    found = [
        line.ask(each.rate, now_us, each.place, may_start=may_start)
        for line, each in zip(lines, asked, strict=True)
    ]
    waits_us = [-1 if turn.starts else turn.wait_us for _, turn in found]
    at = waits_us.index(max(waits_us))
    if waits_us[at] < 0:
        return [line for line, _ in found], Turn()
    return [*lines[:at], found[at][0], *lines[at + 1 :]], replace(found[at][1], at=at)


def places_in(header: object) -> dict[str, int]:
    """Parse the header with a task's places: the place in each line, by the line's name."""
    with suppress(TypeError, ValueError, AttributeError, RecursionError):
        places = json.loads(header).items()  # type: ignore[arg-type]
        # Redis has exact numbers up to 2**53.
        return {
            name: at for name, at in places if type(at) is int and abs(at) < 2**53 and is_text(name)
        }
    return {}


def at_rate(
    stored: Sequence[str | None], rate: Rate, now_us: int, *, sets: bool | None = None
) -> tuple[Line, Rate]:
    """Return a line and its rate; *stored* has the arguments of :meth:`Line.decoded`.

    The line's rate is *rate*, the rate of the asking worker. If ``delay rates set`` set another
    rate for the line, that rate applies instead. :meth:`.Lines.change` explains *sets*.
    """
    line, known = Line.decoded(*stored)  # type: ignore[arg-type]
    if sets is not None:
        line = line._replace(is_set=int(sets))
    elif line.is_set and known is not None:
        return line, known
    if known is None or known.shown == rate.shown:
        return line, rate
    return line.changed(known, rate, now_us), rate


def seen_longest_first(records: Iterable[tuple[str, str]], now_us: int) -> list[RateLine]:
    """Decode the states of lines from pairs of name and text; most waiting tasks come first."""
    seen = []
    for name, text in records:
        line, rate = Line.decoded(*text.split("\n"))
        if rate is not None:
            seen.append(line.seen(name, rate, now_us))
    return sorted(seen, key=lambda line: -line.waiting)


def name_of(name: str, key: str | None) -> str:
    """Return the name of the line for the rate with this *name* and for this *key*."""
    return name if key is None else f"{name}{_SEPARATOR}{key}"


@lru_cache
def _rate(limit: str, burst: int) -> Rate:
    return Rate(limit, burst=burst, concurrent=1 if limit == UNLIMITED else None)
