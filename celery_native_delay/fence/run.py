"""Attempt fencing: of all attempts at a part of a Spark job, the tasks of one run. Pure.

Every message of a fenced run says who sent it: ``run/partition/attempt``. One record per run says
whose tasks run. It is opened before the first message goes out. It is sealed once: by the driver
when the job ends, or by a worker if the driver did not seal it in time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum

from ..texts import is_text

#: A change in what a record holds, beyond new fields, is a new version.
VERSION = 1

#: The one header of a message that belongs to a fenced run.
HEADER = "native_delay_fence"

#: A record outlives the last due time of its run by this, for tasks that wait in a long queue, are
#: parked or redelivered. 30 days; a record takes some bytes per partition.
MARGIN_SECONDS = 30 * 86_400

#: How long a message waits in the broker for a run that is not sealed: a tenth of the time that the
#: run has been open, within these bounds. So much it may be late.
SHORTEST_HOLD_SECONDS = 1.0
LONGEST_HOLD_SECONDS = 30.0

#: The same while the records cannot be asked.
BLIND_HOLD_SECONDS = 5.0

OPEN, COMMITTED, ABORTED, ALL = "open", "committed", "aborted", "all"


@dataclass(frozen=True)
class Stamp:
    """The sender of a message. No two attempts share *attempt*, whatever Spark counts."""

    run: str
    partition: int
    attempt: str

    def __str__(self) -> str:
        return f"{self.run}/{self.partition}/{self.attempt}"

    @classmethod
    def parse(cls, text: object) -> Stamp:
        """The stamp that :meth:`__str__` wrote, of a run that may have slashes; or ValueError."""
        parts: Sequence[str] = text.rsplit("/", 2) if is_text(text) else ()
        if len(parts) != 3 or not all(parts) or not parts[1].isdecimal():
            raise ValueError(f"expected run/partition/attempt, got {text!r}")
        return cls(parts[0], int(parts[1]), parts[2])


@dataclass(frozen=True)
class Record:
    """The state of a run; times are seconds since the epoch.

    *state* is "open"; "committed": of each partition, the attempt in *winners* runs; "aborted":
    none does; or "all": every attempt does, which only a worker decides.
    """

    state: str
    at: float
    """The time when it was opened, or sealed."""
    deadline: float = 0.0
    """The time from which on workers decide about an open one."""
    winners: Mapping[str, str] = field(default_factory=dict)
    by: str = ""
    """The driver or worker that sealed it."""
    jobs: tuple[str, ...] = ()
    """The jobs that have opened it. Another one may open it again after it was aborted."""
    rows: str = ""
    """Count and checksum of the rows of a committed run; "" if they were not counted."""

    def to_json(self) -> str:
        return json.dumps({"v": VERSION, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """The record that :meth:`to_json` wrote; later releases may add to it."""
        values = json.loads(text)
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**known | {"jobs": tuple(known.get("jobs", ()))})

    @property
    def is_final(self) -> bool:
        """True if it stays as it is: a job that sends the run again opens an aborted one again."""
        return self.state in (COMMITTED, ALL)


def opened(held: Record | None, new: Record, job: str) -> Record:
    """The record of a run that *job* opens with *new*: a sealed one stays as it is.

    One that is open already gets the later deadline. An aborted one is replaced, unless *job* had
    opened that: workers may have dropped what the job has sent.
    """
    if held is None or (held.state == ABORTED and job not in held.jobs):
        return replace(new, jobs=(job,))
    if held.state != OPEN:
        return held
    jobs = held.jobs if job in held.jobs else (*held.jobs, job)
    return replace(held, deadline=max(held.deadline, new.deadline), jobs=jobs)


def sealed(held: Record | None, new: Record) -> Record:
    """The record of a run that is sealed with *new*: a sealed one stays as it is."""
    if held is None:
        return new
    return replace(new, jobs=held.jobs) if held.state == OPEN else held


class Fate(Enum):
    """The fate of a fenced message in a worker."""

    RUN = "run"
    DROP = "drop"
    HOLD = "hold"
    """Let it wait: the run is not sealed."""


def fate(record: Record, stamp: Stamp) -> Fate:
    """The fate of a message of *stamp* while its run has *record*."""
    match record.state:
        case "open":
            return Fate.HOLD
        case "committed":
            won = record.winners.get(str(stamp.partition)) == stamp.attempt
            return Fate.RUN if won else Fate.DROP
        case "aborted":
            return Fate.DROP
    return Fate.RUN  # of a later release, too: rather twice than never


def is_overdue(record: Record | None, *, now: float) -> bool:
    """True if a worker has to seal the run: it was not done in time, or its record is lost (None).

    *now* is in seconds since the epoch.
    """
    return record is None or (record.state == OPEN and now >= record.deadline)


def given_up(policy: str, *, now: float, by: str) -> Record:
    """The record of a run that was not sealed in time, by the *policy* "run" or "drop"."""
    return Record(ALL if policy == "run" else ABORTED, now, by=by)


def hold_seconds(record: Record | None, *, now: float) -> float:
    """Seconds until the run of a message is looked up again; None: the records are away."""
    if record is None:
        return BLIND_HOLD_SECONDS
    wait = min(max((now - record.at) / 10, SHORTEST_HOLD_SECONDS), LONGEST_HOLD_SECONDS)
    return max(min(wait, record.deadline - now), SHORTEST_HOLD_SECONDS)
