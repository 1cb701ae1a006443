"""One run: put load on a broker under a schedule of faults, then judge every task."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep, time

from tests.acceptance.worker import REPOSITORY, Fleet, Record, Worker
from tests.chaos.entries import (
    CATCH_UP,
    COUNT,
    REVIVED_SECONDS,
    EntriesJudgement,
    Occurrence,
    entries,
    judge_entries,
)
from tests.chaos.oracle import (
    PRODUCER_KILLED,
    WORKER_KILLED,
    Judgement,
    Sent,
    Start,
    Struck,
    judge,
    must_run,
    read_notes,
)
from tests.chaos.places import Place, Post, Strike
from tests.chaos.schedule import Fault, FaultKind, schedule
from tests.waiting import PATIENCE_SECONDS, wait_until


class UnknownFault(Exception):
    """The broker cannot have a fault with that name."""


PRODUCERS = 2

SHORTEST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 5.0, 60.0
"""Bounds of the longest delay, which is a third of the run."""

AFTERWARDS_SECONDS = 3.0
"""Extra seconds in which a cancelled task could still run."""


@dataclass(frozen=True)
class Plan:
    """The settings of a run."""

    seed: int
    minutes: float
    rate: float
    """Tasks per second."""
    only: tuple[str, ...] = ()
    """Names of fault kinds; if empty, all."""

    @property
    def longest_seconds(self) -> float:
        third = self.minutes * 60 / 3
        return min(max(third, SHORTEST_WAIT_SECONDS), LONGEST_WAIT_SECONDS)


@dataclass(frozen=True)
class Outcome:
    """The data and the judgement of a finished run."""

    what: str
    plan: Plan
    began_at: float
    struck: tuple[Struck, ...]
    judgement: Judgement
    ended_by_themselves: int
    """The number of workers that ended by themselves and were started again."""
    entries: EntriesJudgement


class Crew:
    """The workers and producers of a run; tend() restarts ended processes."""

    def __init__(self, place: Place, plan: Plan, folder: Path, stack: ExitStack) -> None:
        conf = {
            "native_delay_fused_bits": 0,
            "native_delay_schedules": True,
            "native_delay_schedules_catch_up": CATCH_UP,
            "beat_schedule": entries(place.schedule_queues),
            **place.conf,
        }
        self._once = place.once
        self.fleet = Fleet(place.url, folder, conf, shows_logs=False)
        stack.callback(self.fleet.close)
        stack.callback(self._kill_producers)
        self._folder = folder
        self.posts = place.posts
        strikes = self.worker_killed, self.producer_killed
        self.faults: dict[FaultKind, Strike] = dict(
            zip(_kinds_of_crew(place), strikes, strict=True)
        )
        self.notes_path = folder / "notes.jsonl"
        self.ended_by_themselves = 0
        self._plan = plan
        self._until = 0.0
        self._producers: list[subprocess.Popen[bytes]] = []
        self._produced = 0
        self.workers = [self._employ(post) for post in self.posts]
        for worker in self.workers:
            worker.wait_ready()

    def produce(self, *, until: float) -> None:
        """Start producers that send until the given Unix time."""
        self._until = until
        self._producers = [self._producer() for _ in range(PRODUCERS)]

    def tend(self) -> None:
        """Restart the processes that have ended, as a supervisor does."""
        for number, worker in enumerate(self.workers):
            if worker.process.poll() is not None:
                self.ended_by_themselves += 1
                self.workers[number] = self._employ(self.posts[number])

    @contextmanager
    def worker_killed(self, number: int) -> Iterator[str]:
        place = [place for place, post in enumerate(self.posts) if post.mortal][number]
        worker = self.workers[place]
        worker.kill()
        self.workers[place] = self._employ(self.posts[place])
        yield worker.name

        def ready() -> bool:
            self.tend()
            return " ready." in self.workers[place].log

        wait_until(ready)

    @contextmanager
    def producer_killed(self, number: int) -> Iterator[str]:
        producer = self._producers[number]
        producer.kill()
        producer.wait()
        yield f"producer {number}"
        if time() < self._until:
            self._producers[number] = self._producer()

    def wait_for_producers(self) -> None:
        for producer in self._producers:
            try:
                producer.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:  # it hangs in a call; its notes count
                producer.kill()
                producer.wait()

    def _employ(self, post: Post) -> Worker:
        return self.fleet.worker(
            name=post.queue, queues=post.queue, installed=post.installed, concurrency=1, wait=False
        )

    def _producer(self) -> subprocess.Popen[bytes]:
        """Start a producer process with the next seed."""
        self._produced += 1
        given = [
            self._plan.seed * 1000 + self._produced,
            self._plan.rate / PRODUCERS,
            self._plan.longest_seconds,
            self._until,
            self.notes_path,
            self._once,
        ]
        with (self._folder / f"producer-{self._produced}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.load", *map(str, given)],
                cwd=REPOSITORY,
                env=self.fleet.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _kill_producers(self) -> None:
        for producer in self._producers:
            producer.kill()
            producer.wait()


def run(
    place: Place, plan: Plan, folder: Path, *, tell: Callable[[str], object] = lambda _: None
) -> Outcome:
    """Put load on *place*, let its faults happen, and judge every task."""
    with ExitStack() as stack:
        kinds = _chosen(place, plan.only)
        crew = Crew(place, plan, folder, stack)
        record = crew.fleet.record
        wait_until(lambda: all(map(occurrences_of(record).__contains__, range(COUNT))))
        strikes: dict[FaultKind, Strike] = place.faults | crew.faults
        by_name = {kind.name: strikes[kind] for kind in kinds}
        began = time()
        ends = began + plan.minutes * 60
        crew.produce(until=ends)
        struck: list[Struck] = []

        def pause(until: float, what: str) -> None:
            while time() < until:
                crew.tend()
                tell(f"{time() - began:5.0f} s  {len(struck)} fault(s), now: {what}")
                sleep(min(0.2, max(until - time(), 0)))

        for fault in schedule(plan.seed, plan.minutes, kinds):
            pause(began + fault.at_seconds, "calm")
            if time() + fault.lasts_seconds > ends:
                break  # earlier repairs took longer than planned
            struck.append(_happen(fault, by_name[fault.kind], pause))
        pause(ends, "calm")
        crew.wait_for_producers()
        sent = _read_notes(crew.notes_path)
        _wait_for_all(sent, struck, crew, lambda: pause(time() + 0.5, "waiting for the last"))
        judgement = judge(sent, starts_of(record), struck, patience_seconds=PATIENCE_SECONDS)
        ended = time()
        _wait_for_entries(ended, crew, lambda: pause(time() + 0.5, "waiting for entries"))
        runs = [run for all_of in occurrences_of(record).values() for run in all_of]
        of_entries = judge_entries(runs, struck, began_at=began, ended_at=ended)
        return Outcome(
            place.what, plan, began, tuple(struck), judgement, crew.ended_by_themselves, of_entries
        )


def _chosen(place: Place, only: Sequence[str]) -> list[FaultKind]:
    by_name = {kind.name: kind for kind in (*place.faults, *_kinds_of_crew(place))}
    if unknown := [name for name in only if name not in by_name]:
        raise UnknownFault(f"expected a fault out of {', '.join(by_name)}, got {unknown[0]!r}")
    if only:
        return [by_name[name] for name in only]
    return list(by_name.values())


def _kinds_of_crew(place: Place) -> tuple[FaultKind, FaultKind]:
    mortals = sum(post.mortal for post in place.posts)
    return (
        FaultKind(WORKER_KILLED, 0, 0.5, targets=mortals),
        FaultKind(PRODUCER_KILLED, 0, 0.5, targets=PRODUCERS),
    )


def _happen(fault: Fault, strike: Strike, pause: Callable[[float, str], None]) -> Struck:
    began = time()
    with strike(fault.target) as target:
        pause(time() + fault.lasts_seconds, f"{fault.kind} ({target})")
    return Struck(fault.kind, target, began, time())


def _wait_for_all(
    sent: Sequence[Sent], struck: Sequence[Struck], crew: Crew, wait: Callable[[], None]
) -> None:
    """Wait until every task that has to run has run or is too late, and no more tasks are due."""
    missing = {task.id for task in sent if must_run(task)}
    last_due_at = max((task.due_at for task in sent), default=time())
    deadline = max([last_due_at, *(fault.ended_at for fault in struck)]) + PATIENCE_SECONDS
    while missing and time() < deadline:
        wait()
        missing -= {start.id for start in starts_of(crew.fleet.record)}
    while time() < last_due_at + AFTERWARDS_SECONDS:
        wait()


def _wait_for_entries(ended_at: float, crew: Crew, wait: Callable[[], None]) -> None:
    """Wait until every entry has run for a due time after *ended_at*, or will not any more."""
    deadline = time() + 2 * REVIVED_SECONDS + PATIENCE_SECONDS
    while time() < deadline:
        wait()
        runs = occurrences_of(crew.fleet.record)
        if all(
            any(run.due_at > ended_at for run in runs.get(number, [])) for number in range(COUNT)
        ):
            return


def occurrences_of(record: Record) -> dict[int, list[Occurrence]]:
    """The runs of each schedule entry so far, from the workers' notes."""
    found: dict[int, list[Occurrence]] = {}
    for run in record.runs():
        if run.args:
            occurrence = Occurrence.of(run)
            found.setdefault(occurrence.number, []).append(occurrence)
    return found


def starts_of(record: Record) -> list[Start]:
    """Read the starts of tasks from the workers' notes; a worker's name begins with its queue."""
    return [
        Start(run.id, run.worker.partition("-")[0], run.worker, run.started, run.due)
        for run in record.runs()
    ]


def _read_notes(path: Path) -> list[Sent]:
    if not path.exists():  # at a low rate there may be no task
        return []
    with path.open() as file:
        return read_notes(json.loads(line) for line in file)
