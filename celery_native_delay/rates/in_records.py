"""Stores the queues of rate-limited tasks in a database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..records.interface import Change, RecordName, Snapshot
from .line import Asked, Line, Lines, RateLine, Turn, ask_all, at_rate, seen_longest_first
from .rate import Rate

T = TypeVar("T")


class RecordLines(Lines):
    """The queues of rate-limited tasks, stored in a database."""

    def __init__(self, records: Any) -> None:
        self._records = records

    def ask(self, asked: Sequence[Asked], *, may_start: bool = True) -> Turn:
        def decide(
            lines: Sequence[Line], rates: Sequence[Rate], now_us: int
        ) -> tuple[Sequence[Line], Turn]:
            places = [each.place for each in asked]
            return ask_all(lines, rates, now_us, places, may_start=may_start)

        return self._change_all(asked, decide)

    def look(self, limit: int) -> list[RateLine]:
        at_us, found = self._records.latest("rate", limit)
        return seen_longest_first(found, at_us)

    def close(self) -> None:
        """Do nothing: other parts of this process share the database connection."""

    def _change(
        self,
        asked: Asked,
        decide: Callable[[Line, Rate, int], tuple[Line, T]],
        *,
        sets: bool = False,
    ) -> T:
        def decide_one(lines: Any, rates: Any, now_us: int) -> tuple[Sequence[Line], T]:
            line, answer = decide(*lines, *rates, now_us)
            return [line], answer

        return self._change_all([asked], decide_one, sets=sets)

    def _change_all(
        self,
        asked: Sequence[Asked],
        decide: Callable[[Sequence[Line], Sequence[Rate], int], tuple[Sequence[Line], T]],
        *,
        sets: bool = False,
    ) -> T:
        def change(snapshots: Sequence[Snapshot]) -> tuple[list[Change[None]], T]:
            now_us = snapshots[-1].now_us
            before = [
                at_rate((seen.text or "").split("\n"), each.rate, now_us, sets=sets)
                for seen, each in zip(snapshots, asked, strict=True)
            ]
            lines, rates = zip(*before, strict=True)
            after, answer = decide(lines, rates, now_us)
            return [_stored(*each, now_us) for each in zip(after, rates, strict=True)], answer

        names = [RecordName("rate", each.line) for each in asked]
        return self._records.change_all(names, change)


def _stored(line: Line, rate: Rate, now_us: int) -> Change[None]:
    log = " ".join(map(str, line.log))
    return Change(f"{line.encoded(rate)}\n{log}", line.ends_us(rate, now_us), None)
