"""A load: so many delayed tasks a second, and how their delays are spread."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..durations import duration, seconds_of
from ..errors import InvalidDueTime, NativeDelayError

#: Between two delays that may be any.
ANY_US = 1

_FORMS = (
    'CSV lines "delay,count" or "from,until,count", or JSON: {"60": 1000, "1h": 50}, or a list of '
    '{"from_seconds": 60, "until_seconds": 120, "count": 1000}'
)


class InvalidLoad(NativeDelayError, ValueError):
    """A rate, a delay or a measured broker that is impossible, or a file of them that is none."""


@dataclass(frozen=True)
class Spread:
    """Tasks, *weight* of them, whose delays are *count* equally likely ones, *step_us* apart."""

    first_us: int
    step_us: int
    count: int
    weight: float = 1.0

    @classmethod
    def between(
        cls,
        shortest_seconds: float,
        longest_seconds: float,
        *,
        step_seconds: float = 0.0,
        weight: float = 1.0,
    ) -> Spread:
        """All delays from *shortest_seconds* to *longest_seconds*, each as likely.

        With *step_seconds* whole steps from the shortest on, otherwise any.
        """
        first_us, last_us = round(shortest_seconds * 1e6), round(longest_seconds * 1e6)
        if not 0 <= first_us <= last_us:
            raise InvalidLoad(
                f"expected delays of 0 s or more, the shortest first, got "
                f"{shortest_seconds:g} to {longest_seconds:g} s"
            )
        step_us = max(round(step_seconds * 1e6), ANY_US)
        return cls(first_us, step_us, (last_us - first_us) // step_us + 1, weight)

    @property
    def mean_us(self) -> float:
        return self.first_us + self.step_us * (self.count - 1) / 2

    @property
    def last_us(self) -> int:
        return self.first_us + self.step_us * (self.count - 1)

    def draw_us(self, chance: random.Random) -> int:
        return self.first_us + self.step_us * chance.randrange(self.count)


@dataclass(frozen=True)
class Load:
    """Tasks that are sent *per_second*, with their delays.

    Without *tick_seconds* they come one by one at random, as web requests do; with it, what is to
    be sent goes out together at every tick. With *fixed_dues* the delays count from the moment at
    which sending begins, as those of a fan-out do: it ends when all are sent.
    """

    per_second: float
    spreads: tuple[Spread, ...]
    tick_seconds: float = 0.0
    fixed_dues: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.per_second) and self.per_second > 0):
            raise InvalidLoad(
                f"expected a rate of more than 0 tasks a second, got {self.per_second:g}"
            )
        if not self.spreads or self.weight <= 0:
            raise InvalidLoad(f"expected tasks with a delay, got none: {_FORMS}")

    @property
    def weight(self) -> float:
        """Sum of the weights of all delays: their number, where tasks were counted."""
        return sum(spread.weight for spread in self.spreads)

    @property
    def mean_seconds(self) -> float:
        return sum(one.weight * one.mean_us for one in self.spreads) / self.weight / 1e6

    @property
    def longest_seconds(self) -> float:
        return max(one.last_us for one in self.spreads) / 1e6

    @property
    def densest(self) -> Spread:
        """The delays that most tasks a second have."""
        return max(self.spreads, key=_density)

    @property
    def busiest_per_second(self) -> float:
        """Tasks that come through in a second; of a fan-out those of the second with most."""
        return _density(self.densest) if self.fixed_dues else self.per_second

    @property
    def waiting(self) -> float:
        """Tasks that wait at a time, once the first are through; of a fan-out all of them."""
        return self.weight if self.fixed_dues else self.per_second * self.mean_seconds

    def __str__(self) -> str:
        shortest = min(one.first_us for one in self.spreads) / 1e6
        longest = self.longest_seconds
        delays = duration(shortest)
        if shortest != longest:
            delays += f" to {duration(longest)}"
        what = "due" if self.fixed_dues else "with delays of"
        after = " after the first is sent" if self.fixed_dues else ""
        return f"{self.per_second:,.6g} task(s) a second, {what} {delays}{after}"

    def draw_us(self, chance: random.Random) -> Iterator[int]:
        """Delays at random, for ever."""
        weights = [one.weight for one in self.spreads]
        while True:
            for spread in chance.choices(self.spreads, weights, k=256):
                yield spread.draw_us(chance)

    def as_json(self) -> dict[str, Any]:
        return {
            "per_second": self.per_second,
            "mean_delay_seconds": self.mean_seconds,
            "longest_delay_seconds": self.longest_seconds,
            "tick_seconds": self.tick_seconds,
            "fixed_dues": self.fixed_dues,
        }


def spread_of(text: str, *, step_seconds: float = 0.0) -> Spread:
    """The delays that ``60``, ``1h30m`` or ``1m..10m`` stand for.

    Raises:
        InvalidLoad: it is neither a duration nor a range of them.
    """
    shortest, dots, longest = text.partition("..")
    first = _seconds(shortest)
    return Spread.between(first, _seconds(longest) if dots else first, step_seconds=step_seconds)


def load_of_file(
    text: str, *, per_second: float | None, step_seconds: float = 0.0, tick_seconds: float = 0.0
) -> Load:
    """The load that a CSV or JSON histogram tells; a fan-out's own JSON brings its rate.

    Raises:
        InvalidLoad: it is none, or there is no rate.
    """
    told = _json(text) if text.lstrip()[:1] in ("{", "[") else list(_csv(text))
    fixed = isinstance(told, dict) and "due" in told
    if isinstance(told, dict) and (fixed or "delays" in told):
        if per_second is None and isinstance(told.get("per_second"), int | float):
            per_second = told["per_second"]
        told = told["due"] if fixed else told["delays"]
    if per_second is None:
        raise InvalidLoad("expected a rate: say how many tasks are sent a second with --rate")
    rows = told.items() if isinstance(told, dict) else told
    try:
        spreads = tuple(_spread(row, step_seconds) for row in rows)
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise InvalidLoad(f"expected {_FORMS}; got {type(exc).__name__}: {exc}") from exc
    return Load(
        per_second, tuple(one for one in spreads if one.weight), tick_seconds, fixed_dues=fixed
    )


def load_of_waiting(bars: Sequence[tuple[float, float, int]], *, step_seconds: float = 0.0) -> Load:
    """The load behind what waits, by *bars*: from and until so many seconds from now, and a count.

    As if it had come steadily for as long as the longest delay: then tasks fall due at the rate at
    which they are sent, and as many fall due in the second that begins in *t* as are sent a second
    with a delay longer than *t*.

    Raises:
        InvalidLoad: nothing waits.
    """
    # Of a steady load never more fall due later. Where bars say so, they share what they have, and
    # the delays that end with them are those of the last one.
    blocks: list[_Block] = []
    for low, high, count in reversed([(max(low, 0.0), high, count) for low, high, count in bars]):
        if high <= low:
            continue
        block = _Block(low, low, high, float(count))
        while blocks and block.per_second < blocks[-1].per_second:
            after = blocks.pop()
            block = _Block(low, after.last, after.high, block.due + after.due)
        blocks.append(block)
    spreads, later = [], 0.0
    for block in blocks:
        if (weight := block.per_second - later) > 0:
            spreads.append(
                Spread.between(block.last, block.high, step_seconds=step_seconds, weight=weight)
            )
        later = block.per_second
    if not later:
        raise InvalidLoad("expected tasks that wait, got none: say --rate and --delay instead")
    return Load(later, tuple(reversed(spreads)))


# ---- private ---------------------------------------------------------------------------------


def _density(spread: Spread) -> float:
    return spread.weight / max((spread.last_us - spread.first_us) / 1e6, 1.0)


class _Block(NamedTuple):
    """Bars with the same rate, in seconds from now; *last* is where the last of them begins."""

    low: float
    last: float
    high: float
    due: float

    @property
    def per_second(self) -> float:
        return self.due / (self.high - self.low)


def _seconds(text: str) -> float:
    try:
        return seconds_of(text.strip())
    except InvalidDueTime as exc:
        raise InvalidLoad(
            f"{exc}; a range of delays is such as 1m..10m, with --step 1 of whole seconds"
        ) from exc


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as exc:
        raise InvalidLoad(f"expected {_FORMS}; got what is no JSON: {exc}") from exc


def _csv(text: str) -> Iterator[Sequence[str]]:
    """The lines of a CSV file, without a headline and empty ones."""
    for number, row in enumerate(csv.reader(text.splitlines())):
        cells = [cell.strip() for cell in row]
        if not any(cells) or (number == 0 and not re.search(r"\d", cells[-1])):
            continue
        if len(cells) not in (2, 3):
            raise InvalidLoad(f"expected {_FORMS}; got line {number + 1}: {','.join(row)}")
        yield cells


def _spread(row: Any, step_seconds: float) -> Spread:
    """The delays of one line: a mapping, two cells or three."""
    if isinstance(row, Mapping):
        first = row["delay_seconds"] if "delay_seconds" in row else row["from_seconds"]
        cells: Iterable[Any] = (first, row.get("until_seconds", first), row["count"])
    else:
        cells = row
    low, *more, count = (str(cell) for cell in cells)
    weight = float(count)
    if not (math.isfinite(weight) and weight >= 0):
        raise InvalidLoad(f"expected counts of 0 or more, got {count}")
    first = _seconds(low)
    last = _seconds(more[0]) if more else first
    return Spread.between(first, last, step_seconds=step_seconds, weight=weight)
