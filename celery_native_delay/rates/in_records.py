"""Stores the queues of rate-limited tasks in a database."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..records.interface import Change, RecordName, Records, Snapshot
from .line import Line, RateLine, Turn, name_of, seen_longest_first
from .rate import Rate

T = TypeVar("T")


class RecordLines:
    """The queues of rate-limited tasks, stored in a database."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def ask(
        self, task: str, key: str | None, rate: Rate, place: int | None, *, may_start: bool = True
    ) -> Turn:
        def asked(line: Line, now_us: int) -> tuple[Line, Turn]:
            return line.ask(rate, now_us, place, may_start=may_start)

        return self._change(task, key, rate, asked)

    def hold(self, task: str, key: str | None, rate: Rate, seconds: float) -> int:
        wait_us = round(seconds * 1_000_000)
        return self._change(task, key, rate, lambda line, now: line.hold(rate, now, wait_us))

    def look(self, limit: int) -> list[RateLine]:
        at_us, found = self._records.latest("rate", limit)
        return seen_longest_first(found, at_us)

    def close(self) -> None:
        """Do nothing: other parts of this process share the database connection."""

    def _change(
        self,
        task: str,
        key: str | None,
        rate: Rate,
        decide: Callable[[Line, int], tuple[Line, T]],
    ) -> T:
        def change(snapshot: Snapshot) -> Change[T]:
            text = snapshot.text
            before = Line() if text is None else Line.decoded(*text.split("\n"))[0]
            line, answer = decide(before, snapshot.now_us)
            log = " ".join(map(str, line.log))
            return Change(f"{line.encoded(rate)}\n{log}", line.ends_us(rate), answer)

        return self._records.change(RecordName("rate", name_of(task, key)), change)
