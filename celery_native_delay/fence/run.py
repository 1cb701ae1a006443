"""Fenced Spark runs: if Spark repeats a partition, workers run the tasks of one attempt only.

Each message has a header with its sender, ``run/partition/attempt``. Before the first message is
published, the driver stores the run as open. When the Spark job ends, the driver stores which
attempts won. If the driver misses the deadline, a worker decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum

from ..texts import is_text

#: A change in the record, other than a new field, needs a new version.
VERSION = 1

#: The header of a message of a fenced run.
HEADER = "native_delay_fence"

#: The record of a run is kept for 30 days after its last due time: tasks may be parked,
#: redelivered, or wait in a long queue. A record takes some bytes per partition.
MARGIN_SECONDS = 30 * 86_400

#: A message of a run that is not sealed waits in the broker for a tenth of the time since the run
#: was opened, within these bounds. The message may be late by that time.
SHORTEST_HOLD_SECONDS = 1.0
LONGEST_HOLD_SECONDS = 30.0

#: Seconds that a message waits in the broker while the records are unreachable.
BLIND_HOLD_SECONDS = 5.0

OPEN, COMMITTED, ABORTED, ALL = "open", "committed", "aborted", "all"


@dataclass(frozen=True)
class Stamp:
    """The sender of a message: Spark run, partition and attempt. Each attempt has its own id."""

    run: str
    partition: int
    attempt: str

    def __str__(self) -> str:
        return f"{self.run}/{self.partition}/{self.attempt}"

    @classmethod
    def parse(cls, text: object) -> Stamp:
        """Parse the text ``run/partition/attempt``. Raises ValueError if the text is invalid."""
        parts: Sequence[str] = text.rsplit("/", 2) if is_text(text) else ()
        if len(parts) != 3 or not all(parts) or not parts[1].isdecimal():
            raise ValueError(f"expected run/partition/attempt, got {text!r}")
        return cls(parts[0], int(parts[1]), parts[2])


@dataclass(frozen=True)
class Record:
    """The stored state of a Spark run, which decides whose Celery tasks run.

    Times are in seconds since the epoch. *state* is one of:

    - "open": the winning attempts are not stored yet;
    - "committed": for each partition, only the tasks of the attempt in *winners* run;
    - "aborted": no tasks run;
    - "all": the tasks of all attempts run, which only a worker decides.
    """

    state: str
    at: float
    """The time at which the run was opened, or its winning attempts were recorded."""
    deadline: float = 0.0
    """The time from which workers decide about the run if the driver has not done so."""
    winners: Mapping[str, str] = field(default_factory=dict)
    by: str = ""
    """The name of the driver or worker that decided about the run."""
    jobs: tuple[str, ...] = ()
    """The jobs that have opened the run. Another job may open the run again after an abort."""
    rows: str = ""
    """Number and checksum of the rows of a committed run, or "" if the rows were not counted."""

    def to_json(self) -> str:
        return json.dumps({"v": VERSION, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Parse the JSON of a Spark run's stored state. Unknown fields are ignored."""
        values = json.loads(text)
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**known | {"jobs": tuple(known.get("jobs", ()))})

    @property
    def is_final(self) -> bool:
        """True if the stored state of the Spark run never changes again."""
        return self.state in (COMMITTED, ALL)


def opened(held: Record | None, new: Record, job: str) -> Record:
    """Return the state of a Spark run after *job* begins the run with the state *new*.

    A decided state *held* stays. An open state gets the later deadline. An aborted state is
    replaced if another job begins the run.
    """
    if held is None or (held.state == ABORTED and job not in held.jobs):
        return replace(new, jobs=(job,))
    if held.state != OPEN:
        return held
    jobs = held.jobs if job in held.jobs else (*held.jobs, job)
    return replace(held, deadline=max(held.deadline, new.deadline), jobs=jobs)


def sealed(held: Record | None, new: Record) -> Record:
    """Return the decision about a Spark run: the stored decision, or else *new*."""
    if held is None:
        return new
    return replace(new, jobs=held.jobs) if held.state == OPEN else held


class Fate(Enum):
    RUN = "run"
    DROP = "drop"
    HOLD = "hold"
    """The message waits in the broker, because the winning attempts are not recorded yet."""


def fate(record: Record, stamp: Stamp) -> Fate:
    """Decide whether a worker runs, drops or holds a message that a Spark task has sent."""
    match record.state:
        case "open":
            return Fate.HOLD
        case "committed":
            won = record.winners.get(str(stamp.partition)) == stamp.attempt
            return Fate.RUN if won else Fate.DROP
        case "aborted":
            return Fate.DROP
    return Fate.RUN  # also for a state of a later release: a task runs rather twice than never


def is_overdue(record: Record | None, *, now: float) -> bool:
    """Return True if a worker must decide about a Spark run in place of the driver.

    The worker must decide if the deadline is over, or if the stored state is lost: *record* is
    None.
    """
    return record is None or (record.state == OPEN and now >= record.deadline)


def given_up(policy: str, *, now: float, by: str) -> Record:
    """Make a worker's decision about a Spark run after the deadline.

    With the *policy* "run" all tasks run. With "drop" no tasks run. *by* is the name of the worker.
    """
    return Record(ALL if policy == "run" else ABORTED, now, by=by)


def hold_seconds(record: Record | None, *, now: float) -> float:
    """Return the seconds that a message waits before a worker reads its Spark run again."""
    if record is None:
        return BLIND_HOLD_SECONDS
    wait = min(max((now - record.at) / 10, SHORTEST_HOLD_SECONDS), LONGEST_HOLD_SECONDS)
    return max(min(wait, record.deadline - now), SHORTEST_HOLD_SECONDS)
