"""Stores the valid attempt of each Spark partition; workers run only tasks of this attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..records.interface import Change, RecordName, Records, Snapshot
from .run import Record, opened, sealed


class Runs:
    """Reads and changes the stored states of Spark runs, such as "open" or "committed"."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def open(self, run: str, new: Record, *, job: str, kept_seconds: float) -> Record:
        """Store that the Spark job *job* has begun a run; return the run's stored state.

        *new* is the state of a new run: see :func:`opened`. The state expires in *kept_seconds*.
        """
        return self._change(run, lambda before: opened(before, new, job), kept_seconds)

    def seal(self, run: str, record: Record, *, kept_seconds: float) -> Record:
        """Store the result *record* of a run, unless a result exists; return the stored result.

        The stored result expires in *kept_seconds*.
        """
        return self._change(run, lambda before: sealed(before, record), kept_seconds)

    def load(self, runs: Sequence[str]) -> list[Record | None]:
        """Return the stored states of Spark runs; None for an unknown run."""
        found = self._records.load([_name_of(run) for run in runs])
        return [None if text is None else Record.from_json(text) for text in found]

    def _change(
        self, run: str, rule: Callable[[Record | None], Record], kept_seconds: float
    ) -> Record:
        def decide(snapshot: Snapshot) -> Change[Record]:
            before = None if snapshot.text is None else Record.from_json(snapshot.text)
            after = rule(before)
            # An unchanged record keeps fields that a later release has added.
            new = snapshot.text if after == before else after.to_json()
            return Change(new, snapshot.now_us + round(kept_seconds * 1_000_000), after)

        return self._records.change(_name_of(run), decide)


def _name_of(run: str) -> RecordName:
    return RecordName("run", run)
