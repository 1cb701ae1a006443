"""Stores the queues of tasks that wait for their rate limit in a database."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..records.interface import Change, RecordName, Records, Snapshot
from .line import Line, RateLine, Turn, at_rate, name_of, seen_longest_first
from .rate import Rate

T = TypeVar("T")


class RecordLines:
    """The queues of tasks that wait for their rate limit, stored in a database."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def ask(
        self, task: str, key: str | None, rate: Rate, place: int | None, *, may_start: bool = True
    ) -> Turn:
        def asked(line: Line, rate: Rate, now_us: int) -> tuple[Line, Turn]:
            return line.ask(rate, now_us, place, may_start=may_start)

        return self._change(task, key, rate, asked)

    def hold(self, task: str, key: str | None, rate: Rate, seconds: float) -> int:
        wait_us = round(seconds * 1_000_000)
        return self._change(task, key, rate, lambda line, rate, now: line.hold(rate, now, wait_us))

    def change_rate(self, task: str, key: str | None, rate: Rate, *, is_set: bool) -> Line:
        def set_(line: Line, rate: Rate, now_us: int) -> tuple[Line, Line]:
            line = line._replace(is_set=int(is_set))
            return line, line

        return self._change(task, key, rate, set_, sets=True)

    def look(self, limit: int) -> list[RateLine]:
        at_us, found = self._records.latest("rate", limit)
        return seen_longest_first(found, at_us)

    def close(self) -> None:
        """Do nothing, because other parts of this process use the same database connection."""

    def _change(
        self,
        task: str,
        key: str | None,
        rate: Rate,
        decide: Callable[[Line, Rate, int], tuple[Line, T]],
        *,
        sets: bool = False,
    ) -> T:
        def change(snapshot: Snapshot) -> Change[T]:
            text, now_us = snapshot.text, snapshot.now_us
            stored = (None,) if text is None else text.split("\n")
            before, counts = at_rate(stored, rate, now_us, sets=sets)
            line, answer = decide(before, counts, now_us)
            log = " ".join(map(str, line.log))
            return Change(f"{line.encoded(counts)}\n{log}", line.ends_us(counts), answer)

        return self._records.change(RecordName("rate", name_of(task, key)), change)
