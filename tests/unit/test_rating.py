"""The worker's gate for rate-limited tasks: Celery's consumer in this thread, on the test clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from celery.worker import state

from celery_native_delay import Delay, DelaySettings, Rate, SettingsError, install
from celery_native_delay.clock import Clock
from celery_native_delay.clock.inline_worker import InlinePool
from celery_native_delay.due_time import due_us
from celery_native_delay.rates.in_records import RecordedLines
from celery_native_delay.rates.line import Turn
from celery_native_delay.records.waiting import PLACE
from celery_native_delay.worker import rating
from celery_native_delay.worker.rating import Rated

#: Between two starts of one an hour: 1 % more than it, for clocks that differ.
HOUR = 3636.0


@dataclass
class Shop:
    """An app whose calls have a rate, its worker, and what they did."""

    app: Celery
    clock: Clock
    ran: list[tuple[Any, ...]] = field(default_factory=list)
    """The time, name and arguments of each start."""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    """The limit and place of each question to a rate's queue."""

    def __post_init__(self) -> None:
        assert self.clock._worker is not None
        self.consumer = self.clock._worker._consumer
        self.began = self.clock.now
        (self.rated,) = (gate for gate in self.consumer.strategies._gates if type(gate) is Rated)

    @property
    def seconds(self) -> float:
        return round((self.clock.now - self.began).total_seconds(), 2)

    def call(self, *args: Any, name: str = "call_api", place: int | None = None) -> None:
        """Send a task, which may have a place in ada's queue, to the worker."""
        kept = {} if place is None else {PLACE: json.dumps({"call_api\nada": place})}
        self.app.send_task(name, args, headers=kept)
        self.clock.advance()

    def prefetched_beside(self) -> int:
        self.clock.advance()
        return int(self.consumer.qos.value - self.consumer.initial_prefetch_count)


@pytest.fixture
def rates(request: pytest.FixtureRequest) -> Any:
    """The rates of ``call_api``; a test may give others."""
    return getattr(request, "param", Rate("10/s", key="tenant"))


@pytest.fixture
def shop(rates: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    app = install(Celery("shop", broker="memory://", set_as_current=False))
    install(app, rates={"call_api": rates})

    @app.task(name="call_api", bind=True)
    def call_api(self: Any, tenant: str, number: int = 0) -> None:
        shop.ran.append((shop.seconds, tenant, number))
        assert PLACE not in vars(self.request), "a retry is another attempt and gets a new place"
        if number < 0 and len(shop.ran) == 2:
            raise self.retry(countdown=2)

    @app.task(name="other")
    def other(*args: Any) -> None:
        shop.ran.append((shop.seconds, *args))

    def ask(lines: Any, limits: Any, **options: Any) -> Any:
        shop.asked += [(limit.line, limit.place) for limit in limits]
        return asks(lines, limits, **options)

    asks = RecordedLines.ask
    monkeypatch.setattr(RecordedLines, "ask", ask)
    with Clock(app) as clock:
        shop = Shop(app, clock)
        yield shop


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two requests that keep the pool busy; discarding one frees a process."""
    monkeypatch.setattr(InlinePool, "num_processes", 2)
    requests = [Mock(id="busy"), Mock(id="busy")]
    state.reserved_requests.update(requests)
    return requests


# ---- one task -----------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [None, 60])
@pytest.mark.parametrize("rates", [Rate("1/h", key="tenant")], indirect=True)
def test_a_task_with_a_long_wait_waits_in_the_broker_at_most_for_the_longest_delay(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, longest: int | None
) -> None:
    """It comes back a little before its start, and starts on time."""
    if longest is not None:
        monkeypatch.setattr(shop.rated, "_longest_us", longest * 1_000_000)
    for number in (1, 2):
        shop.call("ada", number)
    (task,) = Delay(shop.app).ls()
    waits = task.due_us / 1e6 - shop.began.timestamp()
    assert HOUR - 1 < waits < HOUR if longest is None else waits == longest
    assert shop.prefetched_beside() == 0
    shop.clock.run_all()
    assert shop.ran == [(0, "ada", 1), (HOUR, "ada", 2)]


def test_a_task_with_a_short_wait_waits_in_the_worker(shop: Shop) -> None:
    """Beside the prefetch, so that the worker takes other tasks meanwhile."""
    for number in range(3):
        shop.call("ada", number)
    assert Delay(shop.app).count() == 0
    assert shop.prefetched_beside() == 2
    shop.clock.run_all()
    assert shop.ran == [(0, "ada", 0), (0.1, "ada", 1), (0.2, "ada", 2)]
    assert shop.prefetched_beside() == 0


def test_the_place_of_a_task_ends_with_its_start(shop: Shop) -> None:
    """A retry is another attempt and gets a new place."""
    shop.call("ada", 1)
    shop.call("ada", -1)
    shop.clock.run_all()
    assert shop.ran == [(0, "ada", 1), (0.1, "ada", -1), (2.1, "ada", -1)]
    assert [place is None for _, place in shop.asked] == [True, True, False, True]


def test_a_key_that_is_no_argument_of_the_task_is_refused_at_boot(shop: Shop) -> None:
    settings = DelaySettings(rates={"call_api": Rate("1/s", key="tenat")})
    with pytest.raises(SettingsError, match=r"one of its arguments, tenant, number; got 'tenat'"):
        Rated(settings, shop.app.tasks)


# ---- without a free process ---------------------------------------------------------------------


def test_without_a_free_process_tasks_wait_before_the_gate_in_their_order(
    shop: Shop, busy: list[Any]
) -> None:
    """Else much time would pass between a task's gate and its start. Others wait behind it."""
    shop.call("other", name="other")
    for tenant in ("ada", "bob"):
        shop.call(tenant)
    shop.call("behind", name="other")
    shop.clock.advance(seconds=0.05)
    assert shop.ran == [(0, "other")]
    assert shop.prefetched_beside() == 0
    assert shop.asked == [("call_api\nada", None), ("call_api\nbob", None)]
    state.reserved_requests.discard(busy[0])
    shop.clock.advance(seconds=0.05)
    assert [args[0] for _, *args in shop.ran] == ["other", "ada", "bob", "behind"]


def test_a_task_that_asks_no_more_blocks_no_other(
    shop: Shop, busy: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection was lost, and the broker delivers it again."""
    monkeypatch.setattr(rating, "_FORGOTTEN_US", 20_000)
    shop.rated._for_process["of a lost connection"] = due_us(shop.began)
    shop.call("ada")
    state.reserved_requests.discard(busy[0])
    shop.clock.advance(seconds=0.015)
    assert shop.ran == []
    shop.clock.advance(seconds=0.01)
    assert len(shop.ran) == 1


@pytest.mark.parametrize("rates", [Rate("1/h")], indirect=True)
def test_a_new_task_with_a_long_wait_waits_in_the_broker(shop: Shop, busy: list[Any]) -> None:
    state.reserved_requests.clear()
    shop.call("ada")
    state.reserved_requests.update(busy)
    shop.call("ada")
    shop.call("other", name="other")
    assert shop.ran == [(0, "ada", 0), (0, "other")]
    assert Delay(shop.app).count() == 1


# ---- the order of a queue ------------------------------------------------------------------------


def test_in_a_worker_only_the_first_task_of_a_queue_asks(shop: Shop) -> None:
    """The next task asks when the first one has started."""
    for number in range(10):
        shop.call("ada", number)
    new = len(shop.asked)
    shop.clock.run_all()
    assert [number for *_, number in shop.ran] == [*range(10)]
    assert new == 10
    assert len(shop.asked) <= new + 2 * 9


@pytest.mark.parametrize("rates", [Rate("2/s")], indirect=True)
def test_a_task_far_behind_the_first_of_its_queue_goes_back_to_the_broker(
    shop: Shop, busy: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a worker whose queue is late would keep all tasks that are late."""
    shop.rated.come_back_late_us = 100_000
    for number in range(2):
        shop.call("ada", number)
    late = Turn(17_000_000, 1)
    monkeypatch.setattr(RecordedLines, "ask", lambda *_, **__: late)
    shop.clock.advance(seconds=0.45)
    (task,) = Delay(shop.app).ls()
    assert task.due_us / 1e6 - shop.began.timestamp() > 17


@pytest.mark.parametrize("rates", [Rate("100/s", key="tenant")], indirect=True)
def test_tasks_start_in_the_order_of_their_places_whichever_comes_first(shop: Shop) -> None:
    for number in range(2):
        shop.call("ada", number)
    for place in (4, 3, 2):
        shop.call("ada", place, place=place)
    assert Delay(shop.app).count() == 0
    shop.clock.run_all()
    assert [number for *_, number in shop.ran] == [0, 1, 2, 3, 4]


LOCKED = Rate("10/s", key="tenant", concurrent=1)


@pytest.mark.parametrize("rates", [LOCKED], indirect=True)
def test_a_task_takes_locks_in_its_turn(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no task has a lock while it waits for its rate."""
    taken, take = list[float](), rating.take_locks
    monkeypatch.setattr(rating, "take_locks", lambda *_: taken.append(shop.seconds) or take(*_))
    for number in (1, 2):
        shop.call("ada", number)
    shop.clock.run_all()
    assert [at for at, *_ in shop.ran] == taken == [0, 0.1]
