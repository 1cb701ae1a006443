"""Fenced runs as records, whichever backend keeps those."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..records.interface import Change, Looked, RecordName, Records
from .run import Record, opened, sealed


class Runs:
    """The runs in *records*, for drivers, executors and workers."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def open(self, run: str, record: Record, *, job: str, kept_seconds: float) -> Record:
        """Let *job* open a run; the record in force, see :func:`~.run.opened`."""
        return self._change(run, lambda before: opened(before, record, job), kept_seconds)

    def seal(self, run: str, record: Record, *, kept_seconds: float) -> Record:
        """Seal a run; the record in force, see :func:`~.run.sealed`."""
        return self._change(run, lambda before: sealed(before, record), kept_seconds)

    def load(self, runs: Sequence[str]) -> list[Record | None]:
        """The records of these runs, None for each that does not exist."""
        found = self._records.load([_name_of(run) for run in runs])
        return [None if text is None else Record.from_json(text) for text in found]

    def _change(
        self, run: str, rule: Callable[[Record | None], Record], kept_seconds: float
    ) -> Record:
        def decide(looked: Looked) -> Change[Record]:
            before = None if looked.text is None else Record.from_json(looked.text)
            after = rule(before)
            # What a later release has added to a record that stays as it is stays, too.
            new = looked.text if after == before else after.to_json()
            return Change(new, looked.now_us + round(kept_seconds * 1_000_000), after)

        return self._records.change(_name_of(run), decide)


def _name_of(run: str) -> RecordName:
    return RecordName("run", run)
