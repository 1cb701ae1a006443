"""The queue of a rate: its limit, utilisation and order, simulated with messages and workers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, pairwise
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_native_delay.rates.line import Asked, Line, ask_all, name_of
from celery_native_delay.rates.rate import Rate

NOON_US = 1_795_176_000_000_000

RATES = st.builds(
    Rate,
    st.sampled_from(["1/s", "3/s", "10/s", "97/s", "100/m", "50/10s", "7/h", "700/m"]),
    burst=st.sampled_from([1, 2, 10]),
)

EVENTS = ["send", "send", "run", "redeliver", "forget", "hold", "outage", "lose"]

OTHER_RATES = {"1/s": "97/s", "3/s": "10/s", "100/m": "700/m", "7/h": "100/h", "50/10s": "5/10s"}


class Task(NamedTuple):
    number: int
    limits: tuple[str, ...] = ("api",)
    sent_us: int = 0


@dataclass
class World:
    """A simulation: each task asks the queues of its limits whenever a worker has it."""

    rates: dict[str, Rate]
    random: Random = field(default_factory=lambda: Random(1))
    late_us: int = 0
    """The largest lateness of one message in twenty; all others have a hundredth of it."""
    start_us: int = 0
    """The longest time from the gate to the start of the task."""
    now_us: int = NOON_US
    lines: dict[str, Line] = field(default_factory=lambda: defaultdict(Line))
    starts: list[tuple[int, Task]] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        self.coming: list[tuple[int, int, Task, dict[str, int]]] = []
        self._tie = count()

    def send(self, task: Task | int, at_us: int, **places: int) -> None:
        task = Task(task, sent_us=at_us) if isinstance(task, int) else task
        heappush(self.coming, (at_us, next(self._tie), task, places))

    def step(self) -> None:
        at_us, _, task, places = heappop(self.coming)
        self.now_us = max(self.now_us, at_us)
        self.asked += 1
        before = [self.lines[name] for name in task.limits]
        asked = [Asked(name, None, self.rates[name], places.get(name)) for name in task.limits]
        after, turn = ask_all(before, asked, self.now_us)
        self.lines.update(zip(task.limits, after, strict=True))
        if turn.starts:
            self.starts.append((self.now_us + self.random.randint(0, self.start_us), task))
            return
        others = [at for at in range(len(after)) if at != turn.at]
        assert [after[at] for at in others] == [before[at] for at in others], "takes no place"
        assert turn.place is not None
        late_us = self.random.randint(0, self.late_us)
        if self.random.random() < 0.95:
            late_us //= 100
        places = places | {task.limits[turn.at]: turn.place}
        self.send(task, self.now_us + turn.wait_us + late_us, **places)

    def run(self, steps: int | None = None) -> None:
        while self.coming and steps != 0:
            steps = None if steps is None else steps - 1
            self.step()

    def shake(self, what: str) -> None:
        """Deliver messages twice, without their places, or not at all."""
        match what:
            case "redeliver":
                for at_us, _, task, places in list(self.coming)[:5]:
                    self.send(task, at_us, **places)
            case "forget":
                self.coming = [(*each[:3], {}) for each in self.coming]
            case "lose":
                del self.coming[::3]

    def hold(self, wait_us: int) -> int:
        self.lines["api"], place = self.lines["api"].hold(self.rates["api"], self.now_us, wait_us)
        return place

    def change(self, rate: Rate, *, moves: bool = True) -> None:
        """Change the rate, and move the waiting messages, as ``Delay.set_rate`` does."""
        line = self.lines["api"].changed(self.rates["api"], rate, self.now_us)
        self.lines["api"], self.rates["api"] = line, rate
        if not moves:
            return
        coming, self.coming = self.coming, []
        for at_us, _, task, places in coming:
            slot_us = line.slot_us(rate, places["api"]) if places else at_us
            self.send(task, min(at_us, max(slot_us, self.now_us)), **places)

    def times(self, name: str = "api") -> list[int]:
        return sorted(at_us for at_us, task in self.starts if name in task.limits)

    @property
    def order(self) -> list[int]:
        return [task.number for _, task in self.starts]

    def most_in_a_window(self, name: str = "api") -> int:
        starts, first, most = self.times(name), 0, 0
        for last, at_us in enumerate(starts):
            while at_us - starts[first] >= self.rates[name].period_us:
                first += 1
            most = max(most, last - first + 1)
        return most

    def assert_promise(self) -> None:
        for name, rate in self.rates.items():
            assert self.most_in_a_window(name) <= rate.most


@settings(max_examples=100)
@given(rate=RATES, seed=st.integers(0, 2**32), data=st.data())
def test_no_window_has_too_many_starts(rate: Rate, seed: int, data: st.DataObject) -> None:
    """Messages may be late, redelivered, out of order, lost or held back for any time."""
    random = Random(seed)
    late_us = data.draw(st.sampled_from([0, 1_000, 300_000, 3 * rate.period_us]))
    world = World({"api": rate}, random, late_us, start_us=rate.window_us - rate.period_us)
    numbers = count()
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(EVENTS)):
            case "send":
                spread_us = data.draw(st.sampled_from([0, rate.spacing_us, rate.period_us]))
                for _ in range(data.draw(st.integers(1, 40))):
                    world.send(next(numbers), world.now_us + random.randint(0, spread_us))
            case "run":
                world.run(data.draw(st.integers(1, 60)))
            case "hold":
                wait_us = data.draw(st.integers(0, 3 * rate.period_us))
                world.send(next(numbers), world.now_us + wait_us, api=world.hold(wait_us))
            case "outage":
                world.now_us += data.draw(st.integers(0, 5 * rate.period_us))
            case what:
                world.shake(what)
    world.run()
    world.assert_promise()


@settings(max_examples=30)
@given(rate=RATES, seed=st.integers(0, 2**32), outage=st.booleans())
def test_a_backlog_uses_what_the_rate_allows(rate: Rate, seed: int, outage: bool) -> None:
    """At least 98 % are used, although messages come late and workers are down for a while."""
    late_us = min(rate.period_us // 8, rate.catch_up_us // 2)
    start_us = rate.window_us - rate.period_us
    world = World({"api": rate}, Random(seed), late_us, start_us)
    total = 3 * rate.count + 20 * rate.burst + 100
    for number in range(total):
        world.send(number, NOON_US + number)
    if outage:
        world.run(total)
        world.now_us += 2 * rate.period_us
        world.starts.clear()
    world.run()
    world.assert_promise()
    used = world.times()
    span_us = used[-1] - used[0] - rate.catch_up_us
    assert (len(used) - 1) * rate.period_us / (span_us * rate.count) >= 0.98
    assert world.asked <= 6 * total


@given(rate=RATES, number=st.integers(2, 200))
def test_tasks_start_in_the_order_of_their_places(rate: Rate, number: int) -> None:
    world = World({"api": rate})
    for message in range(number):
        world.send(message, NOON_US)
    world.run()
    assert world.order == sorted(world.order)
    assert world.asked <= 2 * number, "each waits once"


TWO_RATES = st.builds(
    lambda limit, one, other: (Rate(limit, burst=one), Rate(OTHER_RATES[limit], burst=other)),
    st.sampled_from(sorted(OTHER_RATES)),
    st.sampled_from([1, 10]),
    st.sampled_from([1, 10, 400]),
)


@settings(max_examples=100)
@given(
    rates=TWO_RATES,
    changes=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=8),
    seed=st.integers(0, 2**32),
)
def test_in_a_window_with_a_change_of_the_rate_the_larger_limit_counts(
    rates: tuple[Rate, Rate], changes: list[tuple[int, int]], seed: int
) -> None:
    """And in every other window the limit of the rate at that time."""
    world = World({"api": rates[0]}, Random(seed))
    numbers, in_force = count(), [(NOON_US, rates[0])]
    for steps, number in [*changes, (0, 40)]:
        for _ in range(number):
            world.send(next(numbers), world.now_us + world.random.randint(0, 1_000))
        world.run(steps)
        world.change(rates[len(in_force) % 2])
        in_force.append((world.now_us, world.rates["api"]))
    world.run()
    period_us = rates[0].period_us
    for at_us in world.times():
        before = [rate for since_us, rate in in_force if since_us <= at_us - period_us]
        within = [rate for since_us, rate in in_force if at_us - period_us < since_us <= at_us]
        most = max(rate.most for rate in (*before[-1:], *within))
        assert sum(at_us - period_us < other <= at_us for other in world.times()) <= most


@settings(max_examples=60)
@given(rates=TWO_RATES, number=st.integers(1, 150), seed=st.integers(0, 2**32))
def test_during_a_rolling_deployment_the_larger_limit_holds_and_all_tasks_start(
    rates: tuple[Rate, Rate], number: int, seed: int
) -> None:
    """Workers with the old rate and workers with the new rate ask the same queue in turn."""
    world = World({"api": rates[0]}, Random(seed), late_us=100_000)
    for message in range(number):
        world.send(message, NOON_US + world.random.randint(0, 1_000_000))
    while world.coming:
        rate = world.random.choice(rates)
        if rate != world.rates["api"]:
            world.now_us = max(world.now_us, world.coming[0][0])
            world.change(rate, moves=False)
        world.step()
    assert len(world.starts) == number
    assert world.asked <= 20 * (number + 20)
    assert world.most_in_a_window() <= max(rate.most for rate in rates)


LIMITS = st.builds(Rate, st.sampled_from(["2/s", "10/s", "30/m"]), burst=st.sampled_from([1, 5]))


@settings(max_examples=60)
@given(
    rates=st.fixed_dictionaries(dict.fromkeys(("ada", "bob", "east", "west", "all"), LIMITS)),
    number=st.sampled_from([2, 3]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_several_limits_hold_and_all_tasks_start(
    rates: dict[str, Rate], number: int, seed: int, data: st.DataObject
) -> None:
    """Each task has a tenant, a region and a limit of all, in any order.

    Tasks are lost with a killed worker, redelivered, or lose their places.
    """
    random = Random(seed)
    world, numbers = World(rates, random), count()
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(1, 40))):
            mine = [random.choice(["ada", "ada", "bob"]), random.choice(["east", "west"]), "all"]
            random.shuffle(mine)
            at_us = world.now_us + random.randint(0, 10_000)
            world.send(Task(next(numbers), tuple(mine[:number])), at_us)
        world.run(data.draw(st.integers(0, 100)))
        world.shake(data.draw(st.sampled_from(["run", "lose", "redeliver", "forget"])))
        world.now_us += data.draw(st.sampled_from([0, 0, 5_000_000]))
    waiting, started = len(world.coming), len(world.starts)
    world.run()
    assert len(world.starts) == started + waiting, "all start"
    assert world.asked <= 40 * (len(world.starts) + 100)
    world.assert_promise()


@pytest.mark.parametrize("seed", range(5))
def test_no_task_starves_while_others_cross_its_limits(seed: int) -> None:
    """New tasks come for two minutes, at 0.87 of the limits of the busiest tasks."""
    random = Random(seed)
    tenants = {"ada": Rate("5/s"), "bob": Rate("5/s")}
    rates = tenants | {"east": Rate("6/s"), "west": Rate("6/s"), "all": Rate("9/s")}
    world, at_us = World(rates, random), float(NOON_US)
    while at_us < NOON_US + 120_000_000:
        at_us += random.expovariate(6.5) * 1_000_000
        mine = random.choice(["ada", "ada", "bob"]), random.choice(["east", "east", "west"]), "all"
        world.send(Task(0, mine, round(at_us)), round(at_us))
    world.run()
    assert max(started_us - task.sent_us for started_us, task in world.starts) <= 20_000_000
    world.assert_promise()


def test_one_tenants_flood_takes_no_places_in_the_shared_limit() -> None:
    spacing_us = Rate("2/s").spacing_us
    world = World({"flood": Rate("2/s"), "few": Rate("2/s"), "all": Rate("20/s")})
    for number in range(200):
        world.send(Task(number, ("flood", "all")), NOON_US)
    world.run(200)
    for number in range(10):
        world.send(Task(number, ("few", "all")), NOON_US + 1_000_000 + number)
    world.run()
    assert world.times("few")[-1] <= NOON_US + 1_000_000 + 10 * spacing_us
    flood = world.times("flood")
    assert flood[-1] - flood[0] <= 200 * spacing_us * 1.02


def at_work(rate: Rate, number: int, steps: int) -> World:
    """A world in which so many tasks were sent, and asked so often."""
    world = World({"api": rate})
    for message in range(number):
        world.send(message, NOON_US + message)
    world.run(steps)
    return world


@pytest.mark.parametrize("held", [False, True])
def test_waiting_tasks_move_with_a_changed_rate_in_their_order(held: bool) -> None:
    world = at_work(Rate("10/m"), 30, steps=30)
    if held:
        world.send(99, world.now_us + 5_000_000, api=world.hold(5_000_000))
    rate = Rate("20/s")
    world.change(rate)
    world.send(100, world.now_us)
    changed_us, asked = world.now_us + held * 5_000_000, world.asked
    assert world.lines["api"].seen("api", rate, world.now_us).waiting == 29 + held
    world.run()
    assert world.order == [0, *[99] * held, *range(1, 30), 100]
    assert world.times()[-1] - changed_us <= 33 * rate.spacing_us
    assert world.asked - asked <= 2 * 32


def test_tasks_of_a_lowered_rate_are_further_apart() -> None:
    world = at_work(Rate("20/s"), 30, steps=40)
    world.change(Rate("10/m"))
    changed_us, started = world.now_us, len(world.starts)
    world.run()
    assert world.order == sorted(world.order)
    after = [at_us for at_us in world.times() if at_us > changed_us]
    assert after[0] >= changed_us + 60_000_000 - 1_000_000, "the last minute's starts count"
    assert all(b - a >= 5_000_000 for a, b in pairwise(after))
    assert started + len(after) == 30


def test_a_hold_delays_all_waiting_tasks_and_puts_its_task_first() -> None:
    world = at_work(Rate("10/s"), 5, steps=5)
    assert world.order == [0]
    held_until_us = world.now_us + 30_000_000
    world.send(99, held_until_us, api=world.hold(30_000_000))
    world.send(100, world.now_us)
    world.run()
    assert world.order == [0, 99, 1, 2, 3, 4, 100]
    spaced = world.times()[1:]
    assert spaced[0] == held_until_us
    assert spaced[-1] - spaced[0] <= 6 * world.rates["api"].spacing_us


@given(line=st.builds(Line, *[st.integers(0, 2**52)] * 9), rate=RATES)
def test_a_record_survives_encoding_and_decoding(line: Line, rate: Rate) -> None:
    assert Line.decoded(line.encoded(rate), " ".join(map(str, line.log))) == (line, rate)


@pytest.mark.parametrize("text", [None, "", "1 1 2", "nonsense"])
def test_a_missing_or_malformed_record_is_an_empty_queue(text: str | None) -> None:
    assert Line.decoded(text) == (Line(), None)


def test_the_public_view_of_a_rates_queue() -> None:
    rate = Rate("10/s", burst=2)
    line = Line()
    for number in range(7):
        line, _ = line.ask(rate, NOON_US + number, None)
    seen = line.seen(name_of("shop.call_api", "ada"), rate, NOON_US + 7)
    assert (seen.task, seen.key, seen.rate) == ("shop.call_api", "ada", "10/s, burst 2")
    assert (seen.waiting, seen.starts_last_period, seen.held_until_us) == (5, 2, None)
    assert seen.utilisation == 0.2
    assert seen.next_slot_us is not None
    assert NOON_US < seen.next_slot_us <= NOON_US + rate.spacing_us
    held, _ = line.hold(rate, NOON_US + 7, 5_000_000)
    shown = held.seen("shop.call_api", rate, NOON_US + 8)
    assert (shown.key, shown.waiting) == (None, 6)
    assert shown.held_until_us == shown.next_slot_us == NOON_US + 7 + 5_000_000
