"""Holds: where held tasks wait, and what the gate decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery

from celery_native_delay import Delay, Rate, RetryAfter, install
from celery_native_delay.app import holds
from celery_native_delay.app.holds import TAKEN_UP_SECONDS, HoldCalls
from celery_native_delay.clock import Clock
from celery_native_delay.errors import InvalidQuery, TopologyMismatch
from celery_native_delay.records.holds import (
    EDGES_US,
    MOST_HOLDS,
    Hold,
    decoded,
    encoded,
    free_place,
)
from celery_native_delay.records.waiting import ALL
from celery_native_delay.worker.holding import _OLD_SECONDS, Holding

NOW_US = 1_795_176_000_000_000
HOUR_US = 3_600_000_000
HOLD = Hold("shop.*", by="ada@web1", since_us=NOW_US - HOUR_US, place=3)


def test_held_tasks_keep_their_order_in_a_range_of_their_own() -> None:
    was_us = [0, NOW_US - 2 * HOUR_US, NOW_US, NOW_US + 1, NOW_US + 1000 * HOUR_US]
    due_us = [HOLD.due_us(each) for each in was_us]
    assert due_us == sorted(set(due_us))
    assert EDGES_US[3] <= due_us[0] < due_us[-1] < EDGES_US[4]


def test_a_hold_with_an_end_lets_its_tasks_go_at_the_end_in_order() -> None:
    hold = Hold("shop.*", since_us=NOW_US - HOUR_US, until_us=NOW_US + HOUR_US)
    assert hold.due_us(0) == NOW_US + HOUR_US
    assert hold.due_us(NOW_US) < hold.due_us(NOW_US + 1000) < NOW_US + 1.01 * HOUR_US
    assert hold.range_us[0] < hold.due_us(0) <= hold.due_us(NOW_US + HOUR_US) < hold.range_us[1]
    assert hold.concerns("shop.pay", NOW_US)
    assert not hold.concerns("shop.pay", NOW_US + HOUR_US)


def test_a_hold_does_not_take_a_place_in_which_tasks_still_wait() -> None:
    counts = [0, 7, *[0] * (2 * MOST_HOLDS - 2)]
    assert free_place([Hold("a", place=0)], counts) == 2
    with pytest.raises(InvalidQuery, match="at most 40 holds"):
        free_place([Hold(str(place), place=place) for place in range(MOST_HOLDS)], counts)


def test_holds_survive_their_text_and_a_later_version_is_refused() -> None:
    hold = Hold("a", "acme", "args:x", "drop", "ada", 1, None, 0, 4, 5)
    assert decoded(encoded([hold])) == [hold]
    assert encoded([]) is None
    assert decoded(None) == []
    with pytest.raises(TopologyMismatch, match="version 1, got 2"):
        decoded("2\n[]")


def test_a_hold_that_is_renewed_lets_each_task_go_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers hold the tasks again at once, in the range in which they were before."""
    monkeypatch.setattr(holds, "TAKEN_UP_SECONDS", 0)
    calls, held = HoldCalls(), [SimpleNamespace(id="a"), SimpleNamespace(id="b")]
    moved = Mock(side_effect=[[True, True], AssertionError("it never ends")])
    for name, answer in (("_ranges", [ALL]), ("_count", 2), ("_page", held)):
        monkeypatch.setattr(calls, name, Mock(return_value=answer))
    monkeypatch.setattr(calls, "_move", moved, raising=False)
    assert calls._let_go(HOLD, 0, is_held_again=True) == 2


# ---- the gate, in Celery's consumer on the test clock --------------------------------------------


@dataclass
class Shop:
    app: Celery
    clock: Clock
    ran: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.clock._worker is not None
        self.delay, self.holding = Delay(self.app), self.clock._worker.holding

    def pay(self, number: int = 0, tenant: str = "acme") -> Any:
        result = self.app.send_task("shop.pay", (tenant, number))
        self.clock.advance(minutes=1)
        return result


@pytest.fixture
def shop() -> Iterator[Shop]:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    its = Rate("1000/s", key="tenant")
    install(app, rates={"shop.pay": its, "shop.call_api": its})

    @app.task(name="shop.pay", shared=False)
    def pay(tenant: str, number: int) -> None:
        shop.ran.append(number)

    @app.task(name="shop.call_api", shared=False)
    def call_api(tenant: str) -> None:
        raise RetryAfter(3600)

    @app.task(name="other", shared=False)
    def other() -> None:
        shop.ran.append("other")

    with Clock(app) as clock:
        shop = Shop(app, clock)
        yield shop


def test_held_tasks_wait_in_their_order_until_all_holds_are_released(shop: Shop) -> None:
    shop.delay.hold("shop.*", by="ada@web1")
    for number in (1, 2):
        shop.pay(number)
    shop.app.send_task("other")
    shop.clock.advance(days=1)
    assert shop.ran == ["other"]
    held = [task.held for task in shop.delay.ls()]
    assert [(each.hold, each.by) for each in held if each] == [("shop.*", "ada@web1")] * 2
    shop.delay.hold("shop.pay")
    shop.pay(3)
    shop.delay.release("shop.*")
    shop.clock.advance(days=1)
    assert shop.ran == ["other"]
    assert shop.delay.release("shop.pay") == 3
    shop.clock.run_all()
    assert shop.ran == ["other", 1, 2, 3]


@pytest.mark.parametrize(
    ("option", "stops", "lets_pass"),
    [("key", "acme", "gold"), ("search", "args:acme", "args:gold"), ("seconds", 90, 30)],
)
def test_a_hold_stops_only_the_tasks_that_fit(
    shop: Shop, option: str, stops: Any, lets_pass: Any
) -> None:
    options: dict[str, Any] = {option: lets_pass}
    shop.delay.hold("shop.pay", **options)
    shop.pay()
    assert shop.ran == [0]
    shop.delay.hold("shop.pay", **{option: stops})
    shop.pay()
    assert shop.ran == [0]


def test_what_somebody_holds_is_not_lost_by_a_drop_of_others(shop: Shop) -> None:
    shop.delay.drop("shop.*")
    shop.delay.hold("shop.pay")
    result = shop.pay(1)
    assert result.state == "PENDING"
    shop.delay.release("shop.*")
    shop.delay.release("shop.pay")
    shop.clock.run_all()
    assert shop.ran == [1]


def test_a_release_does_not_end_a_hold_that_was_made_meanwhile(shop: Shop) -> None:
    shop.delay.hold("shop.pay", by="ada")
    shop.pay(1)
    shop.delay.release("shop.pay", progress=lambda *_: shop.delay.hold("shop.pay", by="bob"))
    assert [(hold.mode, hold.by) for hold in shop.delay.holds()] == [("hold", "bob")]
    shop.clock.advance(days=1)
    assert shop.ran == []


def test_the_pause_of_another_key_is_not_released(shop: Shop) -> None:
    shop.app.send_task("shop.call_api", ("acme",))
    shop.clock.advance(minutes=1)
    with pytest.raises(InvalidQuery, match=r"\(shop.call_api --key acme\), got 'shop.call_api'"):
        shop.delay.release("shop.call_api")
    assert [line.key for line in shop.delay.rates()] == ["acme"]
    assert shop.delay.release("shop.call_api", key="acme") == 1
    assert shop.delay.holds() == []


def test_a_cancelled_task_is_not_held(shop: Shop) -> None:
    shop.delay.hold("shop.*")
    cancelled = shop.app.send_task("shop.pay", ("acme", 1), countdown=3600)
    assert shop.delay.cancel(cancelled)
    shop.clock.run_all()
    assert (cancelled.state, shop.ran) == ("REVOKED", [])


def test_a_busy_worker_knows_of_a_release_before_the_tasks_are_let_go(shop: Shop) -> None:
    """Its consumer was busy, so nothing has read the holds beside it."""
    assert _OLD_SECONDS < TAKEN_UP_SECONDS
    shop.delay.hold("shop.*")
    shop.pay()
    shop.delay.release("shop.*")
    assert shop.holding.concerns("shop.pay")
    shop.holding._read_at -= TAKEN_UP_SECONDS
    assert not shop.holding.concerns("shop.pay")


AWAY: Any = Mock(load=Mock(side_effect=OSError("it is down")))
"""A store that is away."""


def test_while_the_store_is_away_known_holds_stay_on_and_this_is_told_once(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    shop.delay.hold("shop.*", by="ada@web1")
    shop.pay(1)
    state, shop.holding._state = shop.holding._state, AWAY
    shop.holding._read_at -= TAKEN_UP_SECONDS
    shop.pay(2)
    assert shop.ran == []
    taken_up, away_now = (each for each in caplog.messages if "hold" in each)
    assert taken_up.endswith("held or dropped from now on: shop.* (hold, ada@web1)")
    assert "1 known one(s) stay on: OSError: it is down" in away_now
    shop.holding._state = state
    shop.delay.release("shop.*")
    shop.clock.run_all()
    assert sorted(shop.ran) == [1, 2]


def test_a_worker_that_boots_says_loudly_if_the_holds_stay_unknown(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    shop.delay.hold("shop.*")
    booting = Holding(lambda arrival: ())
    booting.begin(AWAY, shop.holding._consumer, patience_seconds=0.3)
    assert not booting.concerns("shop.pay")
    assert "this worker knows no holds" in caplog.text
    booting.close()


def test_a_worker_sends_an_event_when_other_holds_count(shop: Shop) -> None:
    holding = shop.holding
    holding._consumer.event_dispatcher = events = Mock(enabled=True)
    fields = {"name": "shop.*", "mode": "hold", "by": "ada@web1"}
    for change, told in (
        (lambda: shop.delay.hold("shop.*", by="ada@web1"), [[fields]]),
        (lambda: None, []),
        (lambda: shop.delay.release("shop.*"), [[]]),
    ):
        change()
        holding.begin(holding._state, holding._consumer, patience_seconds=9)
        sent = [call.args[:2] for call in events.publish.mock_calls]
        assert sent == [("delay-holds", {"holds": holds}) for holds in told]
        events.publish.reset_mock()
