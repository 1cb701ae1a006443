"""The arithmetic of a line: who starts now, who waits until when. Pure; times in microseconds.

Theory of operation. A *place* is a point on the line's own clock, one *spacing* after the one
before; its *slot* is ``place + shift - ahead`` on everybody's. What waits elsewhere knows its place
only, so one number moves them all: after an outage, and when the line is held.

Nothing starts because of its place alone. Every start is checked twice. The pace is that of the
generic cell rate algorithm (``start_at`` is its theoretical arrival time, which may lag behind the
clock a little, so that what is late is made up for). The promise is kept by the times of the last
starts: the window that ends now must have room. So a message which comes twice, or whose place was
lost, changes the order of a line, never its rate.

``in_redis.py`` says the same in Lua; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, Self

from .rate import Rate

#: In front of every record: a change in what it holds is a new one.
VERSION = 1

#: How much longer than for its last place and one period the record of a line is kept.
KEPT_US = 60_000_000

#: Between task and key in the name of a line.
_SEPARATOR = "\n"


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


class Line(NamedTuple):
    """The record of a line; an empty one of a line that nothing is known of.

    *end* is the first place that is free, *front* the first that was not used yet. *start_at* is
    when the next start would be neither early nor late, *held_until* the end of a hold. Since
    *counted_from* there were so many *starts*, and *starts_before* in the period before that; in
    all there were *total*. *log* are the times of the last ones, or of each so-manieth.
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
    log: tuple[int, ...] = ()

    def ask(
        self, rate: Rate, now_us: int, place: int | None, *, may_start: bool = True
    ) -> tuple[Self, Turn]:
        """The line afterwards, and the turn of a task; a newcomer has no *place* yet.

        A newcomer that may not start gets a place only.
        """
        if place is None:
            return self._join(rate, now_us, may_start)
        # The record may have been lost.
        end, front = max(self.end, place + rate.spacing_us), self.front or place
        line = self._replace(end=end, front=front)
        slot_us = place + line.shift - rate.ahead_us
        due_us = max(slot_us, line.held_until)
        if due_us > now_us:
            return line, Turn(due_us - now_us, place)
        paced_us = line.start_at - rate.ahead_us
        if paced_us > now_us:
            # Others have taken its turn: all that are behind it make room.
            shift = line.shift + min(rate.spacing_us, paced_us - slot_us)
            return line._replace(shift=shift), Turn(paced_us - now_us, place)
        if (room_us := line._room_us(rate)) > now_us:
            return line, Turn(room_us - now_us, place)
        stood_still_us = now_us - max(paced_us, slot_us, room_us)
        if stood_still_us > max(rate.spacing_us, rate.catch_up_us):
            line = line._replace(shift=line.shift + stood_still_us)
        return line._start(rate, now_us, place), Turn()

    def _room_us(self, rate: Rate) -> int:
        """The time from which the window has room for another start."""
        return self.log[0] + rate.window_us if len(self.log) >= rate.noted else 0

    def _join(self, rate: Rate, now_us: int, may_start: bool) -> tuple[Self, Turn]:
        ahead_us = rate.ahead_us
        place = max(self.end, now_us - self.shift)
        earliest_us = max(self.held_until, self.start_at - ahead_us, self._room_us(rate))
        if earliest_us > now_us:
            place = max(place, earliest_us - self.shift + ahead_us)
        front = place if self.end <= self.front else self.front  # else others are before it
        line = self._replace(end=place + rate.spacing_us, front=front)
        wait_us = place + self.shift - ahead_us - now_us
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
            front=max(line.front, place + rate.spacing_us),
            log=log,
        )

    def hold(self, rate: Rate, now_us: int, wait_us: int) -> tuple[Self, int]:
        """The line afterwards, which lets nothing start for *wait_us*; the place in its front."""
        held_until = max(self.held_until, now_us + wait_us)
        next_us = max(now_us, self.held_until, self.start_at - rate.ahead_us)
        if self.end > self.front:
            next_us = max(next_us, self.front + self.shift - rate.ahead_us)
        shift = self.shift + max(held_until - next_us, 0) + rate.spacing_us
        place = held_until + rate.ahead_us - shift
        end = max(self.end, place + rate.spacing_us)
        front = min(self.front or place, place)
        return self._replace(end=end, shift=shift, held_until=held_until, front=front), place

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
        """The time from which its record is of no use any more."""
        last_us = max(self.end + self.shift, self.start_at, self.held_until)
        return last_us + rate.window_us + rate.catch_up_us + KEPT_US

    def seen(self, name: str, rate: Rate, now_us: int) -> RateLine:
        """The line of that *name*, for people."""
        task, _, key = name.partition(_SEPARATOR)
        next_us = max(self.held_until, self.front + self.shift - rate.ahead_us)
        waiting = max(self.end - self.front, 0) // rate.spacing_us
        counted = self._counted_until(now_us, rate.period_us)
        ago_us = max(now_us - counted.counted_from, 0)
        starts = counted.starts + round(
            counted.starts_before * (rate.period_us - ago_us) / rate.period_us
        )
        return RateLine(
            task,
            key if _SEPARATOR in name else None,
            rate.limit if rate.burst == 1 else f"{rate.limit}, burst {rate.burst}",
            waiting,
            max(next_us, now_us) if waiting else None,
            starts,
            starts / rate.count,
            self.held_until if self.held_until > now_us else None,
        )

    # --- as text ---------------------------------------------------------------------------

    def encoded(self, rate: Rate) -> str:
        """The record as it is kept but for its *log*, with what it takes of *rate* to show it."""
        return " ".join(map(str, (VERSION, *self[:-1], rate.limit, rate.burst)))

    @classmethod
    def decoded(cls, text: str | None, log: str = "") -> tuple[Self, Rate | None]:
        """The line of a record and its rate; an empty one of none, or of another version."""
        words = (text or "").split(" ")
        if words[0] != str(VERSION):
            return cls(), None
        numbers = zip(cls._fields, map(int, words[1:-2]), strict=False)
        line = cls()._replace(**dict(numbers), log=tuple(map(int, log.split())))
        return line, _rate(words[-2], int(words[-1]))


def seen_longest_first(records: Iterable[tuple[str, str]], now_us: int) -> list[RateLine]:
    """The lines of these names and records, for people."""
    seen = []
    for name, text in records:
        line, rate = Line.decoded(*text.split("\n"))
        if rate is not None:
            seen.append(line.seen(name, rate, now_us))
    return sorted(seen, key=lambda line: -line.waiting)


def name_of(task: str, key: str | None) -> str:
    """The name of a line; that of a task with one line is its own."""
    return task if key is None else f"{task}{_SEPARATOR}{key}"


@lru_cache
def _rate(limit: str, burst: int) -> Rate:
    """One rate for all lines that have it, whose numbers are worked out once."""
    return Rate(limit, burst=burst)
