"""The worker's gate for rate-limited tasks: its ruling by the answer of the rate's queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state

from celery_native_delay import DelaySettings, Rate, SettingsError, StoreUnavailable
from celery_native_delay.rates.line import Asked, Turn, places_in
from celery_native_delay.worker import rating
from celery_native_delay.worker.arrival import Arrival, AskAgain, Ruling, WaitUntil
from celery_native_delay.worker.rating import LOOK_SECONDS, PLACE, Rated

NOW_US = 1_795_176_000_000_000

#: The header of a task with a place in ada's queue.
ADAS = '{{"shop.call_api\\nada": {}}}'

RATES = {"shop.call_api": Rate("10/s", key="tenant")}
SETTINGS = DelaySettings(rates=RATES)


def call_api(tenant: str, number: int = 0) -> None:
    """A task's function."""


TASKS = {"shop.call_api": SimpleNamespace(run=call_api)}


class Lines:
    """Queues that always answer *turn*, and remember each question."""

    def __init__(self, turn: Turn | Exception) -> None:
        self.turn = turn
        self.asked: list[tuple[Any, ...]] = []

    def ask(self, asked: Sequence[Asked], *, may_start: bool = True) -> Turn:
        self.asked += [(each.name, each.key, each.place) for each in asked]
        if isinstance(self.turn, Exception):
            raise self.turn
        if not may_start:
            return Turn(self.turn.wait_us, 1000 + len(self.asked))
        place = asked[self.turn.at].place
        return self.turn if self.turn.starts or place is None else replace(self.turn, place=place)

    def change(self, asked: Asked, decide: Any, *, sets: bool | None = None) -> Any:
        raise NotImplementedError

    def look(self, limit: int) -> list[Any]:
        return []

    def close(self) -> None:
        pass


def arrival(
    task: str = "shop.call_api",
    tenant: str = "ada",
    *,
    tag: int = 1,
    now_us: int = NOW_US,
    **headers: Any,
) -> Arrival:
    message = SimpleNamespace(
        headers={"id": "1", "task": task, **headers},
        payload=([tenant, 1], {}, {}),
        delivery_tag=tag,
    )
    consumer = SimpleNamespace(pool=SimpleNamespace(num_processes=2))
    return Arrival(message, message.headers, consumer, now_us)


def ruled(turn: Turn | Exception, task: Arrival) -> tuple[Ruling | None, Lines]:
    gate = Rated(SETTINGS, TASKS)
    gate.lines = lines = Lines(turn)
    gate.come_back_late_us = 100_000
    return gate(task), lines


def test_a_task_starts_when_the_queue_allows_it() -> None:
    task = arrival()
    ruling, lines = ruled(Turn(), task)
    assert ruling is None
    assert lines.asked == [("shop.call_api", "ada", None)]


def test_the_place_header_is_removed_at_the_start() -> None:
    """A retry is another attempt and gets a new place."""
    task = arrival(**{PLACE: ADAS.format(123)})
    ruling, lines = ruled(Turn(), task)
    assert ruling is None
    assert lines.asked == [("shop.call_api", "ada", 123)]
    assert PLACE not in task.message.headers


@pytest.mark.parametrize("place", ['{"shop.call_api\\nbob": 123}', "123", "x ada", ""])
def test_a_place_in_another_queue_is_ignored(place: str) -> None:
    assert ruled(Turn(), arrival(**{PLACE: place}))[1].asked == [("shop.call_api", "ada", None)]


def test_a_task_with_a_long_wait_waits_in_the_broker() -> None:
    """It comes back a little before its start."""
    ruling, _ = ruled(Turn(5_000_000, 123), arrival())
    again = AskAgain(5.0, beside_prefetch=True, from_here=True)
    assert ruling == WaitUntil(NOW_US + 4_900_000, None, again, {PLACE: ADAS.format(123)})


def test_a_wait_beyond_the_longest_delay_is_split() -> None:
    gate = Rated(DelaySettings(rates=RATES, levels=4), TASKS)
    gate.lines = Lines(Turn(3_600_000_000, 123))
    ruling = gate(arrival())
    assert isinstance(ruling, WaitUntil)
    assert 1_000_000 < ruling.due_us - NOW_US < 1_875_000


def test_a_task_with_a_short_wait_waits_in_the_worker() -> None:
    task = arrival()
    ruling, _ = ruled(Turn(150_000, 123), task)
    assert ruling == AskAgain(0.15, beside_prefetch=True, from_here=True)
    assert task.message.headers[PLACE] == ADAS.format(123)


@pytest.mark.parametrize("lines", [None, Lines(StoreUnavailable("away"))])
def test_a_task_waits_while_the_records_are_unreachable(lines: Lines | None) -> None:
    gate = Rated(SETTINGS, TASKS)
    gate.lines = lines
    assert gate(arrival()) == arrival().until_store_answers()


def test_tasks_without_a_rate_ask_no_queue() -> None:
    assert ruled(Turn(), arrival("other"))[1].asked == []


AT_DOOR = AskAgain(LOOK_SECONDS, from_here=True)
SECOND = AskAgain(2 * LOOK_SECONDS, from_here=True)
THIRD = AskAgain(3 * LOOK_SECONDS, from_here=True)


@pytest.fixture
def requests() -> Iterator[list[Any]]:
    """Two requests that keep the pool busy; discarding one frees a process."""
    busy = [SimpleNamespaceWithHash() for _ in range(2)]
    state.reserved_requests.update(busy)
    yield busy
    state.reserved_requests.clear()


def test_without_a_free_process_a_task_waits_before_its_gate_and_later_ones_behind_it(
    requests: list[Any],
) -> None:
    """Otherwise much time would pass between its gate and its start, or it would never start."""
    gate = Rated(SETTINGS, TASKS)
    gate.lines = lines = Lines(Turn())
    assert gate(arrival("other", tag=1)) is None
    assert gate(arrival(tag=2)) == AT_DOOR
    assert gate(arrival("other", tag=3)) == SECOND
    assert lines.asked == [("shop.call_api", "ada", None)]
    state.reserved_requests.discard(requests[0])
    assert gate(arrival(tag=2)) is None
    assert gate(arrival("other", tag=3)) is None


def of(tag: int, **more: Any) -> Arrival:
    """A task whose key no other task has."""
    return arrival(tenant=f"tenant-{tag}", tag=tag, **more)


def test_tasks_before_the_gate_pass_in_their_order(requests: list[Any]) -> None:
    gate = Rated(SETTINGS, TASKS)
    gate.lines = Lines(Turn())
    assert [gate(of(tag)) for tag in (1, 2, 3)] == [AT_DOOR, SECOND, THIRD]
    state.reserved_requests.discard(requests[0])
    assert [gate(of(tag)) for tag in (3, 2, 1)] == [THIRD, SECOND, None]
    state.reserved_requests.discard(requests[1])
    assert [gate(of(tag)) for tag in (3, 2)] == [None, None]


def test_a_task_that_asks_no_more_blocks_no_other(requests: list[Any]) -> None:
    """Its connection was lost, and the broker delivers it again."""
    gate = Rated(SETTINGS, TASKS)
    gate.lines = Lines(Turn())
    assert [gate(of(tag)) for tag in (1, 2)] == [AT_DOOR, SECOND]
    state.reserved_requests.discard(requests[0])
    assert gate(of(2, now_us=NOW_US + 900_000)) == SECOND
    assert gate(of(2, now_us=NOW_US + 1_800_000)) is None


def test_a_new_task_with_a_long_wait_does_not_wait_before_the_gate(requests: list[Any]) -> None:
    gate = Rated(SETTINGS, TASKS)
    gate.lines = Lines(Turn(5_000_000, 123))
    assert isinstance(gate(arrival(tag=1)), WaitUntil)
    assert gate(arrival("other", tag=2)) is None


# ---- several limits ------------------------------------------------------------------------------

SEVERAL = {"shop.call_api": [Rate("10/s", key="tenant"), Rate("5000/d", name="all")]}


def test_a_task_with_several_limits_waits_for_the_one_with_the_longest_wait() -> None:
    gate = Rated(DelaySettings(rates=SEVERAL), TASKS)
    gate.begin(lines := Lines(Turn(5_000_000, 123, at=1)))
    task = arrival()
    ruling = gate(task)
    assert isinstance(ruling, WaitUntil)
    assert lines.asked == [("shop.call_api", "ada", None), ("all", None, None)]
    header = task.message.headers[PLACE]
    assert places_in(header) == {"all": 123}
    lines.turn = Turn(50_000, 77, at=0)
    again = arrival(**{PLACE: header})
    assert gate(again) == AskAgain(0.05, beside_prefetch=True, from_here=True)
    assert lines.asked[-2:] == [("shop.call_api", "ada", None), ("all", None, 123)]
    lines.turn = Turn()
    assert gate(arrival(tag=2)) == BEHIND, "a new task waits behind it"
    assert gate(again) is None
    assert lines.asked[-2:] == [("shop.call_api", "ada", 77), ("all", None, 123)]
    assert PLACE not in again.message.headers


def test_a_task_takes_locks_when_its_turn_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no task has a lock while it waits for its rate."""
    free: list[int | None] = [NOW_US + 5, None]
    monkeypatch.setattr(rating, "take_locks", lambda *_: free.pop(0))
    rates = {"shop.call_api": Rate("10/s", key="tenant", concurrent=2)}
    gate = Rated(DelaySettings(rates=rates), TASKS)
    gate.begin(Lines(Turn()))
    task = arrival()
    assert gate(task) == AskAgain(0.0, beside_prefetch=True, from_here=True)
    assert len(free) == 2
    kept = {PLACE: ADAS.format(1001)}
    assert gate(task) == WaitUntil(NOW_US + 5, None, AskAgain(0.1), kept)
    assert gate(arrival(**kept)) is None


@pytest.mark.parametrize(
    "header",
    [
        "[",
        "[1]",
        "[" * 100_000,
        '{"all": "9"}',
        '{"all": true}',
        '{"all": 1e5}',
        '{"all": 9007199254740992}',
        '{"all": null}',
        '{"shop.call_api\\nbob": 7}',
        "{}",
    ],
)
def test_malformed_places_of_several_limits_are_ignored(header: str) -> None:
    gate = Rated(DelaySettings(rates=SEVERAL), TASKS)
    gate.lines = lines = Lines(Turn())
    assert gate(arrival(**{PLACE: header})) is None
    assert [place for *_, place in lines.asked] == [None, None]


# ---- the order of a queue ------------------------------------------------------------------------


@dataclass
class Here:
    """A worker with tasks of one rate's queue, which asks the gate again when the gate wants it."""

    gate: Rated
    started: list[int] = field(default_factory=list)
    woken: list[int] = field(default_factory=list)

    def asks(self, tag: int, place: int | None = None) -> Ruling | None:
        headers = {} if place is None else {PLACE: ADAS.format(place)}
        ruling = self.gate(arrival(tag=tag, **headers))
        if ruling is None:
            self.started.append(tag)
        elif isinstance(ruling, AskAgain) and ruling.begin_when is not None:
            ruling.begin_when(lambda: self.woken.append(tag))
        return ruling


BEHIND = AskAgain(0.0, beside_prefetch=True, from_here=True)


def test_in_a_worker_only_the_first_task_of_a_queue_asks() -> None:
    """The next task asks when the first one has started."""
    lines = Lines(Turn(50_000, 10))
    gate = Rated(SETTINGS, TASKS)
    gate.begin(lines)
    gate.come_back_late_us = 60_000_000
    here = Here(gate)
    soon = AskAgain(0.05, beside_prefetch=True, from_here=True)
    assert here.asks(1, 10) == soon
    assert [here.asks(3, 30), here.asks(2, 20)] == [BEHIND, BEHIND]
    assert here.asks(4, 5) == soon, "the first place of all came last"
    assert here.asks(1, 10) == BEHIND
    lines.turn = Turn()
    for tag, place in ((4, 5), (1, 10), (2, 20), (3, 30)):
        assert here.asks(tag, place) is None
    assert here.started == [4, 1, 2, 3]
    assert here.woken == [1, 2, 3]
    assert [asked[2] for asked in lines.asked] == [10, 5, 5, 10, 20, 30]


def test_a_task_far_behind_the_first_of_its_queue_goes_back_to_the_broker() -> None:
    """Else a worker whose queue is late would keep all tasks that are late."""
    lines = Lines(Turn(50_000, 10))
    gate = Rated(SETTINGS, TASKS)
    gate.begin(lines)
    here = Here(gate)
    here.asks(1, 10)
    lines.turn = Turn(17_000_000, 180)
    assert isinstance(here.asks(2, 180), WaitUntil)
    lines.turn = Turn(50_000, 11)
    assert here.asks(3, 180) == BEHIND, "the queue says that the start is near"


def test_a_new_task_does_not_start_before_a_task_with_a_place_in_this_worker() -> None:
    lines = Lines(Turn(50_000, 10))
    gate = Rated(SETTINGS, TASKS)
    gate.begin(lines)
    here = Here(gate)
    here.asks(1, 1)
    lines.turn = Turn()
    assert here.asks(2) == BEHIND
    assert here.started == []
    assert [here.asks(1, 1), here.asks(2)] == [None, None]
    assert here.started == [1, 2]


def test_when_a_task_is_put_back_the_next_one_asks() -> None:
    lines = Lines(Turn(50_000, 10))
    gate = Rated(SETTINGS, TASKS)
    gate.begin(lines)
    here = Here(gate)
    here.asks(1, 10)
    here.asks(2, 20)
    lines.turn = StoreUnavailable("away")
    assert isinstance(here.asks(1, 10), WaitUntil)
    assert here.woken == [2]
    lines.turn = Turn(5_000_000, 20)
    assert isinstance(here.asks(2, 20), WaitUntil)


def test_tasks_behind_one_before_the_gate_count_as_prefetched(requests: list[Any]) -> None:
    """Otherwise a worker would take a whole queue while its processes are busy."""
    gate = Rated(SETTINGS, TASKS)
    gate.begin(Lines(Turn()))
    here = Here(gate)
    assert here.asks(1, 10) == AT_DOOR
    assert [here.asks(2, 20), here.asks(3)] == [AskAgain(0.0, from_here=True)] * 2
    state.reserved_requests.discard(requests[0])
    assert here.asks(1) is None
    assert here.woken == [2]


def test_a_new_connection_forgets_the_tasks_of_the_old_one() -> None:
    gate = Rated(SETTINGS, TASKS)
    gate.begin(Lines(Turn(50_000, 10)))
    assert Here(gate).asks(1, 10) is not None
    gate.begin(Lines(Turn()))
    assert Here(gate).asks(2, 20) is None


class SimpleNamespaceWithHash:
    """An object that can be in the set of reserved requests."""


def test_a_key_that_is_no_argument_of_the_task_is_refused_at_boot() -> None:
    with pytest.raises(SettingsError, match=r"one of its arguments, tenant, number; got 'tenat'"):
        Rated(DelaySettings(rates={"shop.call_api": Rate("1/s", key="tenat")}), TASKS)


def test_a_task_whose_key_cannot_be_computed_is_limited_without_a_key() -> None:
    rate = Rate("1/s", key=lambda args, kwargs, headers: 1 / 0)
    gate = Rated(DelaySettings(rates={"shop.call_api": rate}), TASKS)
    gate.lines = lines = Lines(Turn())
    assert gate(arrival()) is None
    assert lines.asked == [("shop.call_api", None, None)]
