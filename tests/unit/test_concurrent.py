"""At most so many tasks of one key run at a time: a simulation with tasks, workers and kills."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from celery_native_delay.keyed import rules
from celery_native_delay.keyed.record import Record
from celery_native_delay.keyed.rules import LEASE_US, Rule, Seen, Step

SECOND = 1_000_000
NOON_US = 1_795_176_000_000_000


@dataclass
class World:
    """A simulation: tasks ask for a lease, run and end; a killed worker's leases expire."""

    most: int
    took_us: int
    random: Random
    now_us: int = NOON_US
    record: Record | None = None
    running: dict[str, int] = field(default_factory=dict)
    """The end of each lease in use; a killed task counts until its lease expires."""
    started: list[str] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        self.events: list[tuple[int, int, str, str]] = []
        self._tie = count()

    def plan(self, at_us: int, what: str, task: str) -> None:
        heappush(self.events, (at_us, next(self._tie), what, task))

    def call(self, rule: Rule) -> Step:
        stored = None if self.record is None else Record.decoded(self.record.encoded())
        step = rule(Seen(self.now_us, stored))
        self.record = step.record
        return step

    def run(self, *, killed: float = 0.0, until_us: int | None = None) -> None:
        while self.events and (until_us is None or self.events[0][0] < until_us):
            self.now_us, _, what, task = heappop(self.events)
            if what == "end":
                self.running.pop(task)
                self.call(partial(rules.end, token=task))
                continue
            if what == "renew":
                if task in self.running:
                    self.call(partial(rules.renew, token=task))
                    self.plan(self.now_us + LEASE_US // 3, "renew", task)
                continue
            if what == "expire":
                self.running.pop(task)
                continue
            self.asked += 1
            step = self.call(partial(rules.share, task_id=task, token=task, most=self.most))
            if step.free_us is not None:
                assert step.free_us > self.now_us
                self.plan(step.free_us, "ask", task)
                continue
            self.started.append(task)
            self.running[task] = self.now_us
            assert len(self.running) <= self.most
            if self.random.random() < killed:
                self.plan(self.now_us + LEASE_US - 1, "expire", task)
            else:
                self.plan(self.now_us + LEASE_US // 3, "renew", task)
                self.plan(self.now_us + self.random.randint(1, 2 * self.took_us), "end", task)


@settings(max_examples=60)
@given(
    most=st.integers(1, 5),
    took_us=st.sampled_from([1_000, SECOND, 300 * SECOND]),
    number=st.integers(1, 80),
    killed=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**32),
)
def test_never_more_than_the_limit_run_and_all_tasks_start(
    most: int, took_us: int, number: int, killed: float, seed: int
) -> None:
    """Although workers are killed: their leases expire."""
    world = World(most, took_us, Random(seed))
    for task in range(number):
        world.plan(NOON_US + world.random.randint(0, SECOND), "ask", str(task))
    world.run(killed=killed)
    assert len(world.started) == number
    assert not world.running


def test_waiting_tasks_use_the_slots_and_do_not_ask_all_the_time() -> None:
    world = World(2, SECOND, Random(1))
    for task in range(200):
        world.plan(NOON_US, "ask", str(task))
    world.run()
    assert world.now_us - NOON_US <= 1.6 * 100 * SECOND
    assert world.asked <= 6 * 200


def test_a_key_with_long_tasks_is_asked_seldom() -> None:
    """Although no task has ended yet, so that their duration is unknown."""
    world = World(2, 3_600 * SECOND, Random(1))
    for task in range(100):
        world.plan(NOON_US, "ask", str(task))
    while world.events[0][0] < NOON_US + 60 * SECOND:
        at_us, _, what, task = heappop(world.events)
        world.now_us = at_us
        if what == "ask":
            world.asked += 1
            begin = partial(rules.share, task_id=task, token=task, most=2)
            if (free_us := world.call(begin).free_us) is not None:
                world.plan(free_us, "ask", task)
    assert world.asked <= 400


def test_waiting_tasks_notice_within_minutes_that_tasks_have_become_short() -> None:
    """Although 500 tasks that try five seconds apart would need 42 minutes."""
    world = World(2, 60 * SECOND, Random(1))
    for task in range(500):
        world.plan(NOON_US, "ask", str(task))
    world.run(until_us=NOON_US + 100 * SECOND)
    asked, world.took_us = world.asked, SECOND // 100
    world.run()
    assert len(world.started) == 500
    assert world.now_us - NOON_US <= 15 * 60 * SECOND
    assert world.asked - asked <= 3 * 500
