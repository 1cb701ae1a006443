"""Schedule entries under faults: their configuration, and the judgement of every due time.

Pure: no broker, no clock. Times are Unix times of one machine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from itertools import pairwise
from typing import Any

from celery_native_delay.schedules.state import MOST_MISSED
from tests.chaos.load import ROUTES, TASK
from tests.chaos.oracle import EARLY_SECONDS, Struck, told

COUNT = 20

#: The relative expiry of an entry counts from its due time. So a run's expiry tells its due time.
EXPIRES_SECONDS = 3600.0

#: Workers run every missed due time, so that a due time without a run is a fault of this package.
CATCH_UP = "all"

#: A due time counts as hit by a fault up to so long after the repair: a Celery worker that cannot
#: connect tries again after 2, 4, 6, 8 and 10 s.
AFTERMATH_SECONDS = 20.0

#: A worker publishes a lost occurrence again when it is overdue by 60 s, and looks each 30 s.
REVIVED_SECONDS = 60.0


def entries(queues: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Schedule entries of 1 to 5 s, spread over *queues*, as ``beat_schedule`` has them."""
    found = {}
    for number in range(COUNT):
        queue = queues[number % len(queues)]
        options = {"expires": EXPIRES_SECONDS} | ROUTES.get(queue, {"queue": queue})
        entry = {"task": TASK, "schedule": seconds_of(number), "args": [number]}
        found[f"entry-{number}"] = entry | {"options": options}
    return found


def seconds_of(number: int) -> float:
    """The interval of the entry *number*."""
    return float(number % 5 + 1)


class Verdict(Enum):
    """The verdict on an entry's due time that did not run exactly once."""

    SKIPPED = "skipped"
    """No run, although the entry ran for later due times, or had time to."""
    EARLY = "early"
    """A run before the due time."""
    TWO_CHAINS = "two chains"
    """A due time nearer than half an interval to another one."""
    DOUBLED_IN_CALM = "doubled in calm"
    """Two runs of one due time, and no fault explains it."""
    TWO_MESSAGES = "two messages"
    """Two runs of one due time with two task ids: two messages were taken for valid."""
    DOUBLED = "doubled"
    """Two runs of one message around a fault; at-least-once delivery allows it."""
    LEFT_OUT = "left out"
    """No run, because the entry had already run late for the 100 due times before it."""


FORBIDDEN = (
    Verdict.SKIPPED,
    Verdict.EARLY,
    Verdict.TWO_CHAINS,
    Verdict.DOUBLED_IN_CALM,
    Verdict.TWO_MESSAGES,
)


@dataclass(frozen=True)
class Occurrence:
    """A run of the entry *number*, due and started at Unix times."""

    number: int
    due_at: float
    at: float
    id: str
    worker: str

    @classmethod
    def of(cls, run: Any) -> Occurrence:
        due_at = datetime.fromisoformat(run.expires).timestamp() - EXPIRES_SECONDS
        return cls(run.args[0], due_at, run.started, run.id, run.worker)


@dataclass(frozen=True)
class Finding:
    verdict: Verdict
    number: int
    due_at: float
    story: tuple[str, ...]


@dataclass(frozen=True)
class EntriesJudgement:
    """The verdicts on all due times of all entries."""

    findings: tuple[Finding, ...]
    ran: int
    """The number of due times that ran."""
    lateness: tuple[tuple[float, float], ...]
    """The due time and the lateness in seconds of each first run."""

    @property
    def counts(self) -> Counter[Verdict]:
        return Counter(finding.verdict for finding in self.findings)

    @property
    def forbidden(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict in FORBIDDEN]


def judge_entries(
    occurrences: Iterable[Occurrence], struck: Sequence[Struck], *, began_at: float, ended_at: float
) -> EntriesJudgement:
    """Judge every due time between the Unix times *began_at* and *ended_at*.

    At *began_at* all entries were published. At *ended_at* the last fault was mended; later each
    entry ran for a later due time.
    """
    by_number: dict[int, list[Occurrence]] = defaultdict(list)
    for each in occurrences:
        by_number[each.number].append(each)
    findings: list[Finding] = []
    lateness: list[tuple[float, float]] = []
    for number in range(COUNT):
        runs = sorted(by_number[number], key=lambda run: (run.due_at, run.at))
        firsts = {run.due_at: run for run in reversed(runs)}
        lateness += [(due, run.at - due) for due, run in firsts.items()]
        for verdict, due_at in _verdicts(number, runs, struck, began_at, ended_at):
            story = _story(number, due_at, runs, struck)
            findings.append(Finding(verdict, number, due_at, story))
    return EntriesJudgement(tuple(findings), len(lateness), tuple(sorted(lateness)))


def _verdicts(
    number: int,
    runs: Sequence[Occurrence],
    struck: Sequence[Struck],
    began_at: float,
    ended_at: float,
) -> Iterator[tuple[Verdict, float]]:
    every = seconds_of(number)
    by_due: dict[float, list[Occurrence]] = defaultdict(list)
    for run in runs:
        by_due[run.due_at].append(run)
    for due_at, same in by_due.items():
        if same[0].at < due_at - EARLY_SECONDS:
            yield Verdict.EARLY, due_at
        for again in same[1:]:
            if again.id != same[0].id:
                yield Verdict.TWO_MESSAGES, due_at
            else:
                hit = _hit(struck, due_at - every, again.at)
                yield (Verdict.DOUBLED if hit else Verdict.DOUBLED_IN_CALM), due_at
    # As if there were a run at the beginning and one at the end.
    known = sorted({began_at, *by_due, ended_at})
    for place, (one, other) in enumerate(pairwise(known)):
        if one in by_due and other in by_due and other - one < every / 2:
            yield Verdict.TWO_CHAINS, other
        last = other - every / 2 if other in by_due else other
        before = [due for due in known[: place + 1] if due in by_due][-MOST_MISSED:]
        all_late = all(by_due[due][0].at > due + every for due in before)
        late_until = by_due[before[-1]][0].at if len(before) == MOST_MISSED and all_late else one
        due_at = one + every
        while due_at < last:
            yield (Verdict.LEFT_OUT if due_at <= late_until else Verdict.SKIPPED), due_at
            due_at += every


def _hit(struck: Iterable[Struck], begin: float, end: float) -> bool:
    return any(fault.overlaps(begin - AFTERMATH_SECONDS, end) for fault in struck)


def _story(
    number: int, due_at: float, runs: Sequence[Occurrence], struck: Iterable[Struck]
) -> tuple[str, ...]:
    """The runs and faults around *due_at* as text, in seconds from *due_at*."""
    begin, end = due_at - 3 * seconds_of(number), due_at + 3 * seconds_of(number)
    events = [
        (run.at, f"{run.id} due at {run.due_at - due_at:+.3f} s started by {run.worker}")
        for run in runs
        if begin <= run.due_at <= end
    ]
    around = [fault for fault in struck if fault.overlaps(begin - AFTERMATH_SECONDS, end)]
    return told(due_at, events, around)
