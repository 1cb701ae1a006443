"""Judge every task from the notes of producers and workers and from the faults.

Pure: no broker, no clock. Times are Unix times of one machine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

EARLY_SECONDS = 0.001
"""Due times have milliseconds."""


class Verdict(Enum):
    """The verdict on a task that did not run exactly once at its due time."""

    LOST = "lost"
    """The task was confirmed, not cancelled, and did not run in time; see judge()."""
    EARLY = "early"
    """The task started before its due time."""
    CANCELLED_BUT_RAN = "cancelled but ran"
    """The task started after a cancel that succeeded."""
    MISROUTED = "misrouted"
    """A worker of another queue ran the task."""
    DOUBLED = "doubled"
    """The task started more than once; at-least-once delivery allows it."""
    ONCE_BUT_DOUBLED = "once but doubled"
    """The task is once, and started again although no fault kept its success from being noted."""


FORBIDDEN = (
    Verdict.LOST,
    Verdict.EARLY,
    Verdict.CANCELLED_BUT_RAN,
    Verdict.MISROUTED,
    Verdict.ONCE_BUT_DOUBLED,
)


@dataclass(frozen=True)
class Sent:
    """A sent task, with its times from the producer's notes.

    Without *confirmed_at* the outcome is unknown: the producer was killed or got an error. With
    *cancelling_at* but neither *cancelled_at* nor *cancel_refused* the outcome of the cancel is
    unknown.
    """

    id: str
    queue: str
    sent_at: float
    due_at: float
    confirmed_at: float | None = None
    error: str | None = None
    cancelling_at: float | None = None
    cancelled_at: float | None = None
    cancel_refused: str | None = None
    once: bool = False


@dataclass(frozen=True)
class Start:
    """The start of a task in a worker."""

    id: str
    queue: str
    """The queue that the worker consumes."""
    worker: str
    at: float
    eta_at: float | None = None
    """The due time in the message; the producer's note has an earlier estimate."""

    def due_at(self, task: Sent) -> float:
        """The earliest permitted Unix time of a start."""
        return max(task.due_at, self.eta_at or 0.0)


@dataclass(frozen=True)
class Struck:
    """A fault that happened, from its first effect until the end of its repair."""

    kind: str
    target: str
    began_at: float
    ended_at: float

    def overlaps(self, begin: float, end: float) -> bool:
        return self.began_at <= end and begin <= self.ended_at


@dataclass(frozen=True)
class Finding:
    """A task with a verdict, its starts and the faults."""

    verdict: Verdict
    task_id: str
    explanation: str | None
    history: tuple[str, ...]


@dataclass(frozen=True)
class Judgement:
    """The verdicts on a run, and the number of tasks by outcome."""

    findings: tuple[Finding, ...]
    sent: int
    confirmed: int
    unknown: int
    """Tasks sent without an answer: they may run or not."""
    ran: int
    cancelled: int
    cancels_unknown: int
    lateness: tuple[tuple[float, float], ...] = field(repr=False)
    """The due time and the lateness in seconds of each task's first start."""

    @property
    def counts(self) -> Counter[Verdict]:
        return Counter(finding.verdict for finding in self.findings)

    @property
    def reasons(self) -> Counter[str]:
        """The reasons why tasks ran twice, with the number of tasks."""
        twice = [each for each in self.findings if each.verdict is Verdict.DOUBLED]
        return Counter(each.explanation or "unexplained" for each in twice)

    @property
    def forbidden(self) -> list[Finding]:
        """The findings that break a promise."""
        return [finding for finding in self.findings if finding.verdict in FORBIDDEN]


def judge(
    sent: Iterable[Sent],
    starts: Iterable[Start],
    struck: Sequence[Struck],
    *,
    patience_seconds: float,
) -> Judgement:
    """Judge every task of a run.

    A confirmed task is lost if it has not started *patience_seconds* after its due time and after
    the end of the last fault.
    """
    tasks = list(sent)
    by_id: dict[str, list[Start]] = defaultdict(list)
    for start in starts:
        by_id[start.id].append(start)
    findings: list[Finding] = []
    lateness = []
    for task in tasks:
        runs = sorted(by_id.get(task.id, []), key=lambda run: run.at)
        if runs:
            due_at = runs[0].due_at(task)
            lateness.append((due_at, runs[0].at - due_at))
        for verdict, explanation in _verdicts(task, runs, struck, patience_seconds):
            story = history(task, runs, struck)
            findings.append(Finding(verdict, task.id, explanation, story))
    return Judgement(
        findings=tuple(findings),
        sent=len(tasks),
        confirmed=sum(task.confirmed_at is not None for task in tasks),
        unknown=sum(task.confirmed_at is None for task in tasks),
        ran=len(lateness),
        cancelled=sum(task.cancelled_at is not None for task in tasks),
        cancels_unknown=sum(_may_be_cancelled(task) for task in tasks),
        lateness=tuple(lateness),
    )


def must_run(task: Sent) -> bool:
    """True if *task* was confirmed and certainly not cancelled, so it has to run."""
    is_cancelled = task.cancelled_at is not None or _may_be_cancelled(task)
    return task.confirmed_at is not None and not is_cancelled


def _verdicts(
    task: Sent, runs: Sequence[Start], struck: Sequence[Struck], patience_seconds: float
) -> Iterable[tuple[Verdict, str | None]]:
    mended_at = max((fault.ended_at for fault in struck), default=0.0)
    deadline = max(task.due_at, mended_at) + patience_seconds
    if must_run(task) and not any(run.at <= deadline for run in runs):
        yield Verdict.LOST, None
    if any(run.at < run.due_at(task) - EARLY_SECONDS for run in runs):
        yield Verdict.EARLY, None
    asked_at = task.cancelling_at if task.cancelled_at is not None else None
    if asked_at is not None and any(run.at > asked_at for run in runs):
        yield Verdict.CANCELLED_BUT_RAN, None
    if any(run.queue != task.queue for run in runs):
        yield Verdict.MISROUTED, None
    if len(runs) > 1:
        yield Verdict.DOUBLED, why_doubled(task, runs, struck)
        if task.once and not _is_cut_short(runs[0], struck):
            yield Verdict.ONCE_BUT_DOUBLED, None


def why_doubled(task: Sent, runs: Sequence[Start], struck: Sequence[Struck]) -> str | None:
    """The fault that made *task* run twice; None if no fault did."""
    first, second = runs[0].at, runs[1].at
    unanswered_until = task.confirmed_at or max(second, task.due_at)
    workers = {run.worker for run in runs[:-1]}
    for fault in struck:
        killed = fault.kind == WORKER_KILLED and fault.target in workers
        if killed and fault.overlaps(first, second):
            return "its worker was killed before it had acknowledged it"
    others = [fault for fault in struck if fault.kind != WORKER_KILLED]
    if any(fault.overlaps(task.sent_at, unanswered_until) for fault in others):
        return "its producer got no answer, and sent it again"
    others = [fault for fault in others if fault.kind != PRODUCER_KILLED]
    if any(fault.overlaps(first, second) for fault in others):
        return "the broker did not get its acknowledgement"
    if any(fault.overlaps(task.sent_at, first) for fault in others):
        return "the broker handed it over twice, after a fault"
    return None


WORKER_KILLED, PRODUCER_KILLED = "worker-killed", "producer-killed"

NOTED_SECONDS = 5.0
"""A worker on a busy machine has noted the success of a task so many seconds after its start."""


def _is_cut_short(run: Start, struck: Sequence[Struck]) -> bool:
    """True if the worker of *run* was killed before it may have noted the task's success."""
    for kill in struck:
        if kill.kind == WORKER_KILLED and kill.target == run.worker:
            # Without the store, a success is noted after the end of the fault.
            away = [fault.ended_at for fault in struck if fault.overlaps(run.at, run.at)]
            if run.at <= kill.began_at <= max([run.at, *away]) + NOTED_SECONDS:
                return True
    return False


def _may_be_cancelled(task: Sent) -> bool:
    asked = task.cancelling_at is not None
    return asked and task.cancelled_at is None and task.cancel_refused is None


def told(
    zero_at: float, events: list[tuple[float, str]], faults: Iterable[Struck]
) -> tuple[str, ...]:
    """Events and faults as text, in their order, in seconds since *zero_at*."""
    for fault in faults:
        events.append((fault.began_at, f"{fault.kind} {fault.target}"))
        events.append((fault.ended_at, f"mended: {fault.kind} {fault.target}"))
    return tuple(f"{at - zero_at:+.3f} s {what}" for at, what in sorted(events))


def history(task: Sent, runs: Sequence[Start], struck: Sequence[Struck]) -> tuple[str, ...]:
    """The history of *task* as text: events in order, in seconds since it was sent."""
    end = max([task.due_at, *(run.at for run in runs)])
    events = [(task.sent_at, f"sent to {task.queue}"), (task.due_at, "due")]
    if task.confirmed_at is not None:
        events.append((task.confirmed_at, "confirmed"))
    if task.error is not None:
        events.append((task.sent_at, f"sending failed: {task.error}"))
    if task.cancelling_at is not None:
        events.append((task.cancelling_at, "cancel asked for"))
    if task.cancelled_at is not None:
        events.append((task.cancelled_at, "cancel confirmed"))
    if task.cancel_refused is not None and task.cancelling_at is not None:
        events.append((task.cancelling_at, f"cancel refused: {task.cancel_refused}"))
    events += [(run.at, f"started by {run.worker}") for run in runs]
    meanwhile = [fault for fault in struck if fault.overlaps(task.sent_at, end)]
    return told(task.sent_at, events, meanwhile)


def read_notes(notes: Iterable[Mapping[str, Any]]) -> list[Sent]:
    """Read the sent tasks from the producers' notes."""
    tasks: dict[str, Sent] = {}
    for note in notes:
        task_id, at, what = note["id"], note["at"], note["what"]
        if what == "sending":
            once = note.get("once", False)
            tasks[task_id] = Sent(task_id, note["queue"], at, note["due"], once=once)
            continue
        changes: dict[str, dict[str, Any]] = {
            "confirmed": {"confirmed_at": at},
            "failed": {"error": note.get("error")},
            "cancelling": {"cancelling_at": at},
            "cancelled": {"cancelled_at": at},
            "not cancelled": {"cancel_refused": note.get("said")},
        }
        tasks[task_id] = replace(tasks[task_id], **changes[what])
    return list(tasks.values())
