"""Stores the lines (queues of tasks with the same rate limit and key) as records of a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..records.interface import Change, RecordName, Snapshot, T
from .line import Asked, Decide, Line, RateLine, Turn, ask_all, at_rate, seen_longest_first
from .rate import Rate


class RecordedLines:
    """The storage of all lines; methods may raise StoreUnavailable.

    A line is the queue of waiting tasks with the same rate limit and the same key.
    """

    def __init__(self, records: Any) -> None:
        self._records = records

    def ask(self, asked: Sequence[Asked], *, may_start: bool = True) -> Turn:
        """Decide if a task may start now: every rate limit in *asked* must permit the start.

        Otherwise the task gets a place in the line with the longest wait. If *may_start* is False,
        the task does not start, and only gets a place.
        """

        def change(snapshots: Sequence[Snapshot]) -> tuple[list[Change[None]], Turn]:
            now_us = snapshots[0].now_us
            read = [_read(*each) for each in zip(snapshots, asked, strict=True)]
            rated = [each._replace(rate=rate) for each, (_, rate) in zip(asked, read, strict=True)]
            lines, turn = ask_all([line for line, _ in read], rated, now_us, may_start=may_start)
            stored = zip(lines, rated, strict=True)
            return [_stored(line, each.rate, now_us, None) for line, each in stored], turn

        names = [RecordName("rate", each.line) for each in asked]
        turn: Turn = self._records.change_all(names, change)
        return turn

    def look(self, limit: int) -> list[RateLine]:
        """Return the states of up to *limit* lines, most waiting tasks first."""
        at_us, found = self._records.latest("rate", limit)
        return seen_longest_first(found, at_us)

    def look_at(self, names: Sequence[str], now_us: int) -> list[RateLine]:
        """Return the states of these lines at the time *now_us*; unknown lines are left out."""
        texts = self._records.load([RecordName("rate", name) for name in names])
        found = [(name, text) for name, text in zip(names, texts, strict=True) if text is not None]
        return seen_longest_first(found, now_us)

    def close(self) -> None:
        """Do nothing: other parts of this process share the database connection."""

    def change(self, asked: Asked, decide: Decide[T], *, sets: bool | None = None) -> T:
        """Change one line by the function *decide*, and return the answer of *decide*.

        If *sets* is True, the line keeps the rate in *asked*, and ignores the rate in the workers'
        settings from now on. If *sets* is False, the rate in the workers' settings applies again.
        If *sets* is None, the choice between these rates does not change.
        """

        def changed(snapshot: Snapshot) -> Change[T]:
            line, rate = _read(snapshot, asked, sets=sets)
            line, answer = decide(line, rate, snapshot.now_us)
            return _stored(line, rate, snapshot.now_us, answer)

        answer: T = self._records.change(RecordName("rate", asked.line), changed)
        return answer


def _read(snapshot: Snapshot, asked: Asked, *, sets: bool | None = None) -> tuple[Line, Rate]:
    return at_rate((snapshot.text or "").split("\n"), asked.rate, snapshot.now_us, sets=sets)


def _stored(line: Line, rate: Rate, now_us: int, answer: T) -> Change[T]:
    log = " ".join(map(str, line.log))
    return Change(f"{line.encoded(rate)}\n{log}", line.ends_us(rate, now_us), answer)
