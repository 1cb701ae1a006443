"""Fenced runs: Spark may try a partition several times, and the tasks of one attempt run. Pure.

Every message of a fenced run has a header with its sender: ``run/partition/attempt``. One record
per run tells whose tasks run. The record is opened before the first message is published. It is
sealed once: by the driver when the job ends, or by a worker if the driver did not seal it in time.
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
#: was opened, within these bounds. It may be late by that.
SHORTEST_HOLD_SECONDS = 1.0
LONGEST_HOLD_SECONDS = 30.0

#: Seconds that a message waits in the broker while the records are unreachable.
BLIND_HOLD_SECONDS = 5.0

OPEN, COMMITTED, ABORTED, ALL = "open", "committed", "aborted", "all"


@dataclass(frozen=True)
class Stamp:
    """The sender of a message: run, partition and attempt. Each attempt has an id of its own."""

    run: str
    partition: int
    attempt: str

    def __str__(self) -> str:
        return f"{self.run}/{self.partition}/{self.attempt}"

    @classmethod
    def parse(cls, text: object) -> Stamp:
        """Read a stamp from the text of :meth:`__str__`. Raises ValueError for any other text.

        The name of the run may contain slashes.
        """
        parts: Sequence[str] = text.rsplit("/", 2) if is_text(text) else ()
        if len(parts) != 3 or not all(parts) or not parts[1].isdecimal():
            raise ValueError(f"expected run/partition/attempt, got {text!r}")
        return cls(parts[0], int(parts[1]), parts[2])


@dataclass(frozen=True)
class Record:
    """The record of a fenced run. Times are in seconds since the epoch.

    *state* is one of:

    - "open": the run is not sealed yet;
    - "committed": of each partition, the tasks of the attempt in *winners* run;
    - "aborted": no tasks run;
    - "all": the tasks of all attempts run, which only a worker decides.
    """

    state: str
    at: float
    """The time at which the run was opened, or sealed."""
    deadline: float = 0.0
    """The time from which workers seal the run if it is still open."""
    winners: Mapping[str, str] = field(default_factory=dict)
    by: str = ""
    """The driver or worker that sealed the run."""
    jobs: tuple[str, ...] = ()
    """The jobs that have opened the run. Another job may open it again after it was aborted."""
    rows: str = ""
    """Number and checksum of the rows of a committed run; "" if they were not counted."""

    def to_json(self) -> str:
        return json.dumps({"v": VERSION, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Read the JSON of :meth:`to_json`. Unknown fields, of later releases, are ignored."""
        values = json.loads(text)
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**known | {"jobs": tuple(known.get("jobs", ()))})

    @property
    def is_final(self) -> bool:
        """True if the record never changes again. An aborted run can be opened by another job."""
        return self.state in (COMMITTED, ALL)


def opened(held: Record | None, new: Record, job: str) -> Record:
    """The record of a run after *job* opens it with the record *new*; *held* is the present record.

    A sealed record stays as it is. An open record gets the later of the two deadlines. An aborted
    record is replaced, unless the same *job* had opened it: workers may have dropped its messages.
    """
    if held is None or (held.state == ABORTED and job not in held.jobs):
        return replace(new, jobs=(job,))
    if held.state != OPEN:
        return held
    jobs = held.jobs if job in held.jobs else (*held.jobs, job)
    return replace(held, deadline=max(held.deadline, new.deadline), jobs=jobs)


def sealed(held: Record | None, new: Record) -> Record:
    """The record of a run after sealing it with *new*. A record that is sealed stays as it is."""
    if held is None:
        return new
    return replace(new, jobs=held.jobs) if held.state == OPEN else held


class Fate(Enum):
    """A worker's decision about a message of a fenced run."""

    RUN = "run"
    DROP = "drop"
    HOLD = "hold"
    """The message waits in the broker, because its run is not sealed yet."""


def fate(record: Record, stamp: Stamp) -> Fate:
    """Decide about a message with the sender *stamp*, given the *record* of its run."""
    match record.state:
        case "open":
            return Fate.HOLD
        case "committed":
            won = record.winners.get(str(stamp.partition)) == stamp.attempt
            return Fate.RUN if won else Fate.DROP
        case "aborted":
            return Fate.DROP
    return Fate.RUN  # also for a state of a later release: rather twice than never


def is_overdue(record: Record | None, *, now: float) -> bool:
    """True if a worker has to seal the run: its deadline is over, or its record is lost (None).

    *now* is in seconds since the epoch.
    """
    return record is None or (record.state == OPEN and now >= record.deadline)


def given_up(policy: str, *, now: float, by: str) -> Record:
    """The record with which a worker seals a run after its deadline.

    With the *policy* "run" all tasks run, with "drop" none. *by* is the worker.
    """
    return Record(ALL if policy == "run" else ABORTED, now, by=by)


def hold_seconds(record: Record | None, *, now: float) -> float:
    """Seconds that a message waits in the broker until its run is looked up again.

    *record* is None if the records are unreachable.
    """
    if record is None:
        return BLIND_HOLD_SECONDS
    wait = min(max((now - record.at) / 10, SHORTEST_HOLD_SECONDS), LONGEST_HOLD_SECONDS)
    return max(min(wait, record.deadline - now), SHORTEST_HOLD_SECONDS)
