"""The stored state of a run: the tasks that one fan-out has sent, in one or several tries.

A task of the run has its name in the header ``RUN``. So one stored word cancels all its tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from ..durations import DAY_US
from ..errors import TopologyMismatch
from ..texts import storable
from .interface import Change, RecordName, Records, Snapshot

VERSION = 1

#: The kinds of stored state: of a run that a user named, and of a batch of a stream.
RUN_KIND, BATCH_KIND = "run", "batch"

#: Microseconds for which the state of a batch is kept: a stream replays only its last batch.
_BATCH_KEPT_US = DAY_US


@dataclass(frozen=True)
class RunRecord:
    """The stored state of one run. Times are in microseconds since the epoch.

    - *began_us*: the beginning of the first try. All tries count from it, and reject the same rows.
    - *kept_us*: the time at which this state expires.
    - *tries*: how often the run was sent, and *job*: the Spark job that sent it last.
    - *rows*, *sent*, *rejected*: the numbers of its largest try.
    - *moved_us*: the time by which all its tasks were rescheduled.
    - *cancelled*: True if workers announce its tasks as revoked.
    """

    run_id: str
    task: str
    began_us: int
    kept_us: int
    tries: int = 0
    job: str = ""
    rows: int = 0
    sent: int = 0
    rejected: int = 0
    moved_us: int = 0
    cancelled: bool = False

    def encoded(self) -> str:
        return json.dumps({"v": VERSION, **asdict(self)})

    @classmethod
    def decoded(cls, text: str) -> RunRecord:
        """Parse the JSON of a run's state. Raises TopologyMismatch for an unknown version."""
        fields = json.loads(text)
        if (version := fields.pop("v", None)) != VERSION:
            raise TopologyMismatch(
                f"expected the state of a run in version {VERSION}, got {version}: use the same "
                f"release of celery_native_delay everywhere"
            )
        return cls(**fields)


def begin_run(
    records: Records,
    run_id: str,
    task: str,
    now_us: int,
    *,
    job: str,
    longest_us: int,
    kind: str = RUN_KIND,
) -> RunRecord:
    """Note that a Spark job sends a run, and return its state; the first sets its beginning.

    Each part of the job may say so. *longest_us* is the longest delay of its tasks.
    """

    def begun(seen: Snapshot) -> Change[RunRecord]:
        kept_us = _BATCH_KEPT_US if kind == BATCH_KIND else longest_us
        known = _known(seen) or RunRecord(run_id, task, now_us, seen.now_us + kept_us)
        new = replace(known, tries=known.tries + (known.job != job), job=job)
        return Change(new.encoded(), new.kept_us, new)

    return records.change(name_of_run(run_id, kind), begun)


def change_run(
    records: Records, run_id: str, change: Callable[[RunRecord, int], RunRecord]
) -> RunRecord | None:
    """Store what *change* makes of a run's state at a time; return it, or None without a state."""

    def changed(seen: Snapshot) -> Change[RunRecord | None]:
        known = _known(seen)
        new = None if known is None else change(known, seen.now_us)
        return Change(None, 0, None) if new is None else Change(new.encoded(), new.kept_us, new)

    return records.change(name_of_run(run_id), changed)


def read_run(records: Records, run_id: str) -> RunRecord | None:
    """Return the state of a run; None if it is unknown, or was forgotten."""
    return _known(records.read(name_of_run(run_id)))


def latest_runs(records: Records, limit: int) -> list[RunRecord]:
    """Return up to *limit* runs, those with the latest tasks first."""
    _, found = records.latest(RUN_KIND, limit)
    return [RunRecord.decoded(text) for _, text in found]


def ended(known: RunRecord, now_us: int, *, last_us: int, kept_us: int) -> RunRecord:
    """Keep the state for *kept_us* after the last task, which is due at *last_us*."""
    return replace(known, kept_us=max(last_us, now_us) + kept_us)


def name_of_run(run_id: str, kind: str = RUN_KIND) -> RecordName:
    return RecordName(kind, storable(run_id))


def _known(seen: Snapshot) -> RunRecord | None:
    return None if seen.text is None else RunRecord.decoded(seen.text)
