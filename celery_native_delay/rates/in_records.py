"""Stores the queues of rate-limited tasks in a database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from ..records.interface import Change, RecordName, Records, Snapshot
from .line import Asked, Line, RateLine, Turn, ask_all, at_rate, name_of, seen_longest_first
from .rate import Rate

T = TypeVar("T")
Lines: TypeAlias = Sequence[Line]


class RecordLines:
    """The queues of rate-limited tasks, stored in a database."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def ask(self, asked: Sequence[Asked], *, may_start: bool = True) -> Turn:
        places = [each.place for each in asked]
        return self._change(
            asked,
            lambda lines, rates, now_us: ask_all(lines, rates, now_us, places, may_start=may_start),
        )

    def hold(self, task: str, key: str | None, rate: Rate, seconds: float) -> int:
        def decide(lines: Lines, rates: Sequence[Rate], now_us: int) -> tuple[Lines, int]:
            line, place = lines[0].hold(rates[0], now_us, round(seconds * 1_000_000))
            return [line], place

        return self._change([Asked(task, key, rate)], decide)

    def change_rate(self, task: str, key: str | None, rate: Rate, *, is_set: bool) -> Line:
        def decide(lines: Lines, *_: Any) -> tuple[Lines, Line]:
            line = lines[0]._replace(is_set=int(is_set))
            return [line], line

        return self._change([Asked(task, key, rate)], decide, sets=True)

    def look(self, limit: int) -> list[RateLine]:
        at_us, found = self._records.latest("rate", limit)
        return seen_longest_first(found, at_us)

    def close(self) -> None:
        """Do nothing: other parts of this process share the database connection."""

    def _change(
        self,
        asked: Sequence[Asked],
        decide: Callable[[Lines, Sequence[Rate], int], tuple[Lines, T]],
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

        names = [RecordName("rate", name_of(each.name, each.key)) for each in asked]
        return self._records.change_all(names, change)


def _stored(line: Line, rate: Rate, now_us: int) -> Change[None]:
    log = " ".join(map(str, line.log))
    return Change(f"{line.encoded(rate)}\n{log}", line.ends_us(rate, now_us), None)
