"""Computes when rate-limited tasks may start. This module does no I/O.

All tasks with the same name and key form a queue, called *line*. All times are in microseconds.

Each message of a waiting task contains a *place*, a time on the queue's own clock. The places of
two successive tasks differ by *spacing*. A task may start at the time ``place + shift - ahead``,
called *slot*; *ahead* is the advance that the rate's burst gives. After an outage or a
``RetryAfter``, the queue increases *shift*, so that all waiting tasks start later. After a change
of the rate, *pivot* and *unit* convert the places of the earlier rate.

Before each start two conditions are checked:

- The pace follows the generic cell rate algorithm (GCRA). ``start_at`` is the theoretical arrival
  time of GCRA. This time may be a little in the past, so that tasks catch up after late starts.
- The number of starts within the last period is below the limit.

Therefore redelivered messages and messages without a place cannot break the rate limit.

``in_redis.py`` has the same arithmetic in Lua, and a test compares the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from math import ceil, floor
from typing import Any, NamedTuple, Protocol, Self

from .rate import MOST_KEPT_STARTS, UNLIMITED, Rate

#: The version at the beginning of every record. A change in the record needs a new one.
VERSION = 2

#: The record of a line is kept for a minute longer than its last place and one period.
KEPT_US = 60_000_000

#: A rate that was set by ``Delay.set_rate`` is kept for a hundred years.
SET_KEPT_US = 100 * 365 * 86_400_000_000

#: The separator between task and key in the name of a line.
_SEPARATOR = "\n"

_DIGITS = re.compile("[0-9]{1,19}")


@dataclass(frozen=True)
class RateLine:
    """The state of a rate limit for one task name and one key; times in epoch microseconds.

    - *task*: the name of the rate, by default the task's name
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
        return {
            "task": self.task,
            "key": self.key,
            "rate": self.rate,
            "waiting": self.waiting,
            "next_slot": _iso(self.next_slot_us),
            "starts_last_period": self.starts_last_period,
            "utilisation": round(self.utilisation, 4),
            "held_until": _iso(self.held_until_us),
            "overridden": self.overridden,
        }


def _iso(moment_us: int | None) -> str | None:
    if moment_us is None:
        return None
    moment = datetime.fromtimestamp(moment_us / 1_000_000, UTC)
    return moment.isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Turn:
    """The decision: start now, or wait *wait_us* microseconds for the limit number *at*."""

    wait_us: int = 0
    place: int | None = None
    at: int = 0

    @property
    def starts(self) -> bool:
        return self.place is None


class Asked(NamedTuple):
    """One limit of a task: the *name* of the rate, the task's *key*, and its place or None."""

    name: str
    key: str | None
    rate: Rate
    place: int | None = None


class Lines(Protocol):
    """The storage of all queues of rate-limited tasks; methods may raise RecordsUnavailable."""

    def ask(self, asked: Sequence[Asked], *, may_start: bool = True) -> Turn:
        """Decide whether a task may start now: all of its limits must permit it.

        Otherwise the task gets a position for the limit with the longest wait. If *may_start* is
        False, a new task only gets a position.
        """

    def hold(self, task: str, key: str | None, rate: Rate, seconds: float) -> int:
        """Pause the tasks with this name and key; return the retried task's position."""

    def change_rate(self, task: str, key: str | None, rate: Rate, *, is_set: bool) -> Line:
        """Change the rate of one key. If *is_set* is False, the rate in the settings counts."""

    def look(self, limit: int) -> Sequence[RateLine]:
        """Return the states of up to *limit* rate limits, longest queue first."""

    def close(self) -> None: ...


class Line(NamedTuple):
    """The stored state of a queue of rate-limited tasks, with times in microseconds.

    - *front*, *end*: the position of the first waiting task, and the position after the last task
    - *shift*: a number that is added to a position to get the start time
    - *start_at*: the time at which the next start is exactly on pace
    - *held_until*: no task starts before this time
    - *starts*, *starts_before*: starts since *counted_from*, and starts in the period before
    - *total*: the number of all starts
    - *pivot*, *unit*: after a change of the rate, the position whose time is *pivot* + *shift*, and
      the distance of two positions
    - *is_set*: 1 if ``Delay.set_rate`` has set the rate
    - *log*: the times of the last starts, or of every n-th start
    """

    end: int = 0
    shift: int = 0
    start_at: int = 0
    held_until: int = 0
    counted_from: int = 0
    starts: int = 0
    starts_before: int = 0
    total: int = 0
    front: int = 0
    pivot: int = 0
    unit: int = 0
    is_set: int = 0
    log: tuple[int, ...] = ()

    def ask(
        self, rate: Rate, now_us: int, place: int | None, *, may_start: bool = True
    ) -> tuple[Self, Turn]:
        """Decide whether a rate-limited task may start; return the new state and decision.

        :meth:`Lines.ask` describes *place* and *may_start*.
        """
        if place is None:
            return self._join(rate, now_us, may_start)
        # The record may have been lost, so its end may be before this place.
        end, front = max(self.end, place + self._step(rate)), self.front or place
        line = self._replace(end=end, front=front)
        slot_us = line.slot_us(rate, place)
        due_us = max(slot_us, line.held_until)
        if due_us > now_us:
            return line, Turn(due_us - now_us, place)
        paced_us = line.start_at - rate.ahead_us
        if paced_us > now_us:
            # Other tasks have started in its slot: move it, and all tasks behind it, back.
            shift = line.shift + min(rate.spacing_us, paced_us - slot_us)
            return line._replace(shift=shift), Turn(paced_us - now_us, place)
        if (room_us := line._room_us(rate)) > now_us:
            return line, Turn(room_us - now_us, place)
        stood_still_us = now_us - max(paced_us, slot_us, room_us)
        if stood_still_us > max(rate.spacing_us, rate.catch_up_us):
            line = line._replace(shift=line.shift + stood_still_us)
        return line._start(rate, now_us, place), Turn()

    def _room_us(self, rate: Rate) -> int:
        """The earliest time at which the limit per period permits another start."""
        return self.log[-rate.noted] + rate.window_us if len(self.log) >= rate.noted else 0

    def _step(self, rate: Rate) -> int:
        return self.unit or rate.spacing_us

    def slot_us(self, rate: Rate, place: int) -> int:
        """The time at which the task at *place* may start."""
        scale = rate.spacing_us / self._step(rate)
        return self.shift + self.pivot + floor((place - self.pivot) * scale) - rate.ahead_us

    def _place_at(self, rate: Rate, time_us: int) -> int:
        scale = self._step(rate) / rate.spacing_us
        return self.pivot + ceil((time_us - self.shift - self.pivot) * scale)

    def _join(self, rate: Rate, now_us: int, may_start: bool) -> tuple[Self, Turn]:
        ahead_us = rate.ahead_us
        line = self
        if self.unit and self.end <= self.front:  # no task has a place of the earlier rate
            shift = self.slot_us(rate, self.end) + ahead_us - self.end
            line = self._replace(pivot=0, unit=0, shift=shift)
        place = max(line.end, line._place_at(rate, now_us))
        earliest_us = max(line.held_until, line.start_at - ahead_us, line._room_us(rate))
        if earliest_us > now_us:
            place = max(place, line._place_at(rate, earliest_us + ahead_us))
        front = place if line.end <= line.front else line.front  # else other tasks are in front
        wait_us = max(line.slot_us(rate, place), earliest_us) - now_us
        line = line._replace(end=place + line._step(rate), front=front)
        if wait_us > 0 or not may_start:
            return line, Turn(max(wait_us, 0), place)
        return line._start(rate, now_us, place), Turn()

    def _start(self, rate: Rate, now_us: int, place: int) -> Self:
        line = self._counted_until(now_us, rate.period_us)
        log = line.log
        if line.total % rate.noted_each == 0:
            log = (*log, now_us)[-rate.noted :]
        return line._replace(
            start_at=max(now_us - rate.catch_up_us, line.start_at) + rate.spacing_us,
            starts=line.starts + 1,
            total=line.total + 1,
            front=max(line.front, place + line._step(rate)),
            log=log,
        )

    def hold(self, rate: Rate, now_us: int, wait_us: int) -> tuple[Self, int]:
        """Pause this queue for *wait_us*; return the new state and the retried task's position."""
        held_until = max(self.held_until, now_us + wait_us)
        next_us = max(now_us, self.held_until, self.start_at - rate.ahead_us)
        if self.end > self.front:
            next_us = max(next_us, self.slot_us(rate, self.front))
        shift = self.shift + max(held_until - next_us, 0) + rate.spacing_us
        line = self._replace(shift=shift, held_until=held_until)
        place = line._place_at(rate, held_until + rate.ahead_us)
        end = max(self.end, place + self._step(rate))
        return line._replace(end=end, front=min(self.front or place, place)), place

    def changed(self, old: Rate, new: Rate, now_us: int) -> Self:
        """Return the queue at a *new* rate. Waiting tasks keep their order.

        The starts at the *old* rate still count in the window of one period.
        """
        from_us = max(now_us, self.held_until)
        pivot, start_at = self._place_at(old, from_us), self.start_at
        if start_at > now_us:
            start_at = now_us + (start_at - now_us) * new.spacing_us // old.spacing_us
        line = self if old.period_us == new.period_us else self._replace(starts=0, starts_before=0)
        return line._replace(
            pivot=pivot,
            shift=from_us - pivot,
            unit=self._step(old),
            start_at=start_at,
            log=self._log_for(old, new, now_us),
        )

    def _log_for(self, old: Rate, new: Rate, now_us: int) -> tuple[int, ...]:
        """Return the times of every n-th start, if n changes with the rate. Never too early."""
        each, log = old.noted_each, self.log
        first = (self.total - 1) // each * each - (len(log) - 1) * each
        marks = range(-(-first // new.noted_each) * new.noted_each, self.total, new.noted_each)
        later = [-(-(mark - first) // each) for mark in marks[-MOST_KEPT_STARTS:]]
        return tuple(log[at] if at < len(log) else now_us for at in later)

    def _counted_until(self, now_us: int, period_us: int) -> Self:
        elapsed_us = now_us - self.counted_from
        if elapsed_us < period_us:
            return self
        if elapsed_us < 2 * period_us:
            return self._replace(
                counted_from=self.counted_from + period_us, starts=0, starts_before=self.starts
            )
        return self._replace(counted_from=now_us, starts=0, starts_before=0)

    def ends_us(self, rate: Rate) -> int:
        """The time at which the stored state of this queue expires, in epoch microseconds."""
        last_us = max(self.slot_us(rate, self.end) + rate.ahead_us, self.start_at, self.held_until)
        last_us += SET_KEPT_US if self.is_set else 0
        return last_us + rate.window_us + rate.catch_up_us + KEPT_US

    def seen(self, name: str, rate: Rate, now_us: int) -> RateLine:
        task, _, key = name.partition(_SEPARATOR)
        next_us = max(self.held_until, self.slot_us(rate, self.front))
        waiting = max(self.end - self.front, 0) // self._step(rate)
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
            bool(self.is_set),
        )

    # --- as text ---------------------------------------------------------------------------

    def encoded(self, rate: Rate) -> str:
        """Encode the state of this queue as text, without the start times."""
        return " ".join(map(str, (VERSION, *self[:-1], rate.limit, rate.burst)))

    @classmethod
    def decoded(cls, text: str | None, log: str = "") -> tuple[Self, Rate | None]:
        """Decode the stored state and its rate; return an empty state for other versions."""
        words = (text or "").split(" ")
        if words[0] != str(VERSION):
            return cls(), None
        numbers = zip(cls._fields, map(int, words[1:-2]), strict=False)
        line = cls()._replace(**dict(numbers), log=tuple(map(int, log.split())))
        return line, _rate(words[-2], int(words[-1]))


def ask_all(
    lines: Sequence[Line],
    rates: Sequence[Rate],
    now_us: int,
    places: Sequence[int | None],
    *,
    may_start: bool = True,
) -> tuple[Sequence[Line], Turn]:
    """Ask all limits of one task. Only the queue in which the task waits changes, or all."""
    asked = [
        line.ask(rate, now_us, place, may_start=may_start)
        for line, rate, place in zip(lines, rates, places, strict=True)
    ]
    waits_us = [-1 if turn.starts else turn.wait_us for _, turn in asked]
    if max(waits_us) < 0:
        return [line for line, _ in asked], Turn()
    at = waits_us.index(max(waits_us))
    after, turn = asked[at]
    return [*lines[:at], after, *lines[at + 1 :]], Turn(turn.wait_us, turn.place, at)


def places_header(places: Sequence[tuple[int | None, str | None]]) -> str:
    """Return the header of a task with these places and keys, one for each of its limits."""
    texts = [str(place) if key is None else f"{place} {key}" for place, key in places]
    return texts[0] if len(texts) == 1 else json.dumps(texts)


def places_in(header: object) -> list[tuple[int | None, str | None]]:
    """Parse the header with a task's places and keys. Malformed places are None."""
    texts = [header] if header else []
    if isinstance(header, str) and header.startswith("["):
        with suppress(ValueError, RecursionError):
            texts = json.loads(header)
    parts = [text.partition(" ") if isinstance(text, str) else ("", "", "") for text in texts]
    return [
        (int(place) if _DIGITS.fullmatch(place) else None, key if blank else None)
        for place, blank, key in parts
    ]


def at_rate(
    stored: Sequence[str | None], rate: Rate, now_us: int, *, sets: bool = False
) -> tuple[Line, Rate]:
    """Parse a *stored* queue. Return the queue at its rate: *rate*, or a rate that was set."""
    line, known = Line.decoded(*stored)  # type: ignore[arg-type]
    if known is None or known.shown == rate.shown:
        return line, rate
    if line.is_set and not sets:
        return line, known
    return line.changed(known, rate, now_us), rate


def seen_longest_first(records: Iterable[tuple[str, str]], now_us: int) -> list[RateLine]:
    """Return the decoded states of rate limits, most waiting tasks first."""
    seen = []
    for name, text in records:
        line, rate = Line.decoded(*text.split("\n"))
        if rate is not None:
            seen.append(line.seen(name, rate, now_us))
    return sorted(seen, key=lambda line: -line.waiting)


def name_of(task: str, key: str | None) -> str:
    """Return the storage name of the queue for a task name and key."""
    return task if key is None else f"{task}{_SEPARATOR}{key}"


@lru_cache
def _rate(limit: str, burst: int) -> Rate:
    return Rate(limit, burst=burst, concurrent=1 if limit == UNLIMITED else None)
