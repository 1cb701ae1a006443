"""If Spark repeats a partition, workers run the tasks of only one attempt.

A header of each message names the Spark run, partition and attempt: ``run/partition/attempt``.

1. The driver stores that the run has begun. If a task is due before the run ends, a worker returns
   the task to the broker with a delay of up to 30 seconds.
2. When the Spark job ends, the driver stores the successful attempt of each partition. Workers run
   the tasks of these attempts, and drop all other tasks.
3. If the driver stores no result before the run's deadline, ``native_delay_fence_policy`` decides:
   workers run all tasks, or drop all tasks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum

from ..texts import is_text

#: Increase VERSION when the stored state changes. A new field needs no new version.
VERSION = 1

#: The header of each message that ``FanOut(…, fence=True)`` sends.
HEADER = "native_delay_fence"

#: The state of a Spark run is stored for 30 days after its last due time: tasks may be parked,
#: redelivered, or wait in a long queue. A state takes some bytes per partition.
MARGIN_SECONDS = 30 * 86_400

#: If a message is due before the run's result is stored, a worker returns the message to the broker
#: for a tenth of the time since the run began, within these bounds. So the message may be late.
SHORTEST_HOLD_SECONDS = 1.0
LONGEST_HOLD_SECONDS = 30.0

#: Seconds that a due message waits in the broker while the Redis or database is unreachable.
BLIND_HOLD_SECONDS = 5.0

OPEN, COMMITTED, ABORTED, ALL = "open", "committed", "aborted", "all"


@dataclass(frozen=True)
class Stamp:
    """The sender of a message: a Spark run, a partition and an attempt."""

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
    """The stored state of a Spark run. Times are in seconds since the epoch.

    *state* is one of:

    - "open": the Spark job has not ended;
    - "committed": *winners* has one attempt per partition; workers run only these attempts' tasks;
    - "aborted": no tasks of the run may run;
    - "all": the tasks of all attempts run. Only a worker decides this, after the deadline.
    """

    state: str
    at: float
    """The time at which the run began, or at which its result was stored."""
    deadline: float = 0.0
    """The time after which a worker, not the Spark driver, decides which tasks run."""
    winners: Mapping[str, str] = field(default_factory=dict)
    by: str = ""
    """The name of the driver or worker that stored the result."""
    jobs: tuple[str, ...] = ()
    """The ids of the Spark jobs that began this run."""
    rows: str = ""
    """The number and the checksum of a committed run's rows, or "" if not counted."""

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
    """Return the state to store for a Spark run when the Spark job *job* begins.

    *held* is the stored state. *new* is the state of a new run.

    - If *held* is None, the result is *new*, with *job* as its only job.
    - If *held* is "open", the result is *held* with *job* added, and with the later deadline.
    - If *held* is "aborted" and does not list *job*, the result is also *new* with *job*.
    - Otherwise, the result is *held*.
    """
    if held is None or (held.state == ABORTED and job not in held.jobs):
        return replace(new, jobs=(job,))
    if held.state != OPEN:
        return held
    jobs = held.jobs if job in held.jobs else (*held.jobs, job)
    return replace(held, deadline=max(held.deadline, new.deadline), jobs=jobs)


def sealed(held: Record | None, new: Record) -> Record:
    """Return the stored result of a Spark run, or *new* if no result is stored."""
    if held is None:
        return new
    return replace(new, jobs=held.jobs) if held.state == OPEN else held


class Fate(Enum):
    RUN = "run"
    DROP = "drop"
    HOLD = "hold"
    """The message waits in the broker until the result of the Spark run is stored."""


def fate(record: Record, stamp: Stamp) -> Fate:
    """Return whether a worker runs, drops or delays a due task of a Spark run."""
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
    """Return True if the Spark driver missed the deadline, or the run's state is lost."""
    return record is None or (record.state == OPEN and now >= record.deadline)


def given_up(policy: str, *, now: float, by: str) -> Record:
    """Return the new stored state of a Spark run whose driver missed the deadline.

    The state says if workers run the tasks of the Spark run: all tasks if *policy* (the setting
    ``native_delay_fence_policy``) is "run", no task if *policy* is "drop". *by* is the name of the
    worker that stores the state.
    """
    return Record(ALL if policy == "run" else ABORTED, now, by=by)


def hold_seconds(record: Record | None, *, now: float) -> float:
    """Return the seconds until a worker reads the Spark run's stored state again."""
    if record is None:
        return BLIND_HOLD_SECONDS
    wait = min(max((now - record.at) / 10, SHORTEST_HOLD_SECONDS), LONGEST_HOLD_SECONDS)
    return max(min(wait, record.deadline - now), SHORTEST_HOLD_SECONDS)
