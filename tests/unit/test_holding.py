"""Holds: where held tasks wait, and what the gate decides."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from celery_native_delay.app import holds
from celery_native_delay.app.holds import TAKEN_UP_SECONDS, HoldCalls
from celery_native_delay.errors import InvalidQuery, TopologyMismatch
from celery_native_delay.message import Delayed
from celery_native_delay.records.holds import (
    EDGES_US,
    MOST_HOLDS,
    RECORD,
    Hold,
    decoded,
    encoded,
    free_place,
)
from celery_native_delay.records.interface import RecordName
from celery_native_delay.records.waiting import ALL, HELD, Held
from celery_native_delay.worker.arrival import AWAY_US, Announce, Arrival, WaitUntil
from celery_native_delay.worker.holding import _OLD_SECONDS, Holding
from tests.waiting import wait_until

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


CONSUMER = SimpleNamespace(
    timer=SimpleNamespace(call_repeatedly=lambda *_: None), event_dispatcher=None
)


class State:
    def __init__(self, *holds: Hold) -> None:
        self.holds = holds
        self.away: float = False  # for so many calls

    def load(self, names: list[RecordName]) -> list[str | None]:
        assert names == [RECORD]
        if self.away:
            self.away -= 1
            raise OSError("it is down")
        return [encoded(self.holds)]


def gate(*holds: Hold, keys: tuple[str, ...] = ()) -> tuple[Holding, State]:
    state, made = State(*holds), Holding(lambda arrival: keys)
    made.begin(state, CONSUMER, patience_seconds=9)  # type: ignore[arg-type]
    return made, state


def arrival(name: str = "shop.pay", delayed: Delayed | None = None, **headers: Any) -> Arrival:
    headers = {"id": "1", "task": name, "argsrepr": "('acme',)", **headers}
    message = SimpleNamespace(
        headers=headers, native_delay=delayed, properties={}, delivery_info={}, consumed_from="q"
    )
    return Arrival(message, headers, None, NOW_US)


def test_a_held_task_waits_in_the_store_and_says_who_holds_it() -> None:
    hold, _ = gate(HOLD)
    ruling = hold(arrival())
    assert isinstance(ruling, WaitUntil)
    assert ruling.due_us == HOLD.due_us(NOW_US)
    assert json.loads(ruling.headers[HELD]) == ["shop.*", "ada@web1", NOW_US]
    assert ruling.otherwise is not None, "it must not run if the store refuses it"
    assert hold(arrival("other")) is None


def test_a_task_that_is_held_again_keeps_its_place_in_the_order() -> None:
    hold, _ = gate(HOLD)
    header = Held("shop.*", "bob", NOW_US - HOUR_US).header
    ruling = hold(arrival(**{HELD: header}))
    assert isinstance(ruling, WaitUntil)
    assert ruling.due_us == HOLD.due_us(NOW_US - HOUR_US)
    free = arrival("other", **{HELD: header})
    assert hold(free) is None
    assert HELD not in free.message.headers, "a retry would inherit it"


@pytest.mark.parametrize(
    ("hold", "keys", "stops"),
    [
        (Hold("shop.*", "acme"), ("acme",), True),
        (Hold("shop.*", "acme"), ("gold",), False),
        (Hold("shop.*", "acme"), (), False),
        (Hold("shop.pay", search="args:acme"), (), True),
        (Hold("shop.pay", search="args:gold"), (), False),
        (Hold("shop.pay", mode="release"), (), False),
        (Hold("shop.pay", until_us=1), (), False),
    ],
)
def test_a_hold_stops_only_the_tasks_that_fit(
    hold: Hold, keys: tuple[str, ...], stops: bool
) -> None:
    held, _ = gate(hold, keys=keys)
    assert isinstance(held(arrival()), WaitUntil) is stops


def test_a_busy_worker_knows_of_a_release_before_the_tasks_are_let_go() -> None:
    """Its consumer was busy, so nothing has read the holds beside it."""
    assert _OLD_SECONDS < TAKEN_UP_SECONDS
    hold, state = gate(HOLD)
    state.holds = ()
    hold._read_at -= TAKEN_UP_SECONDS
    assert hold(arrival()) is None


def test_a_hold_that_is_renewed_lets_each_task_go_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers hold the tasks again at once, in the range in which they were before."""
    monkeypatch.setattr(holds, "TAKEN_UP_SECONDS", 0)
    rounds = []

    class Calls(HoldCalls):
        _ranges = staticmethod(lambda hold: [ALL])  # type: ignore[assignment]
        _count = staticmethod(lambda query: 2)  # type: ignore[assignment]
        _page = staticmethod(  # type: ignore[assignment]
            lambda query: [SimpleNamespace(id="a"), SimpleNamespace(id="b")]
        )

        def _move(self, ids: list[str], due_us: object) -> list[bool]:  # type: ignore[override]
            rounds.append(ids)
            assert len(rounds) < 3, "it never ends"
            return [True, True]

    assert Calls()._let_go(HOLD, 0, is_held_again=True) == 2


def test_a_dropped_task_is_announced_as_revoked_and_a_revoked_one_is_not_held() -> None:
    drop, _ = gate(Hold("shop.*", mode="drop"))
    assert drop(arrival()) == Announce()
    hold, _ = gate(HOLD)
    assert hold(arrival(delayed=Delayed("d", NOW_US, "", "q", cancelled=True))) is None


def test_while_the_store_is_away_known_holds_stay_on_and_this_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hold, state = gate(HOLD)
    state.away = math.inf
    for _ in range(2):
        hold.begin(state, CONSUMER, patience_seconds=9)  # type: ignore[arg-type]
    ruling = hold(arrival())
    assert isinstance(ruling, WaitUntil)
    assert (ruling.due_us, ruling.in_broker) == (NOW_US + AWAY_US, True)
    assert [record.message for record in caplog.records] == [
        "native delay: held or dropped from now on: shop.* (hold, ada@web1)",
        (
            "native delay: holds are not read until the store answers; 1 known one(s) stay on: "
            "OSError: it is down"
        ),
    ]
    state.away = False
    hold.begin(state, CONSUMER, patience_seconds=9)  # type: ignore[arg-type]
    assert isinstance(hold(arrival()), WaitUntil)


@pytest.mark.parametrize("away", [2, math.inf])
def test_a_worker_that_boots_waits_for_the_holds_and_says_loudly_if_they_stay_unknown(
    caplog: pytest.LogCaptureFixture, away: float
) -> None:
    made, state = Holding(lambda arrival: ()), State(HOLD)
    state.away = away
    patience_seconds = 60 if away == 2 else 0.3
    made.begin(state, CONSUMER, patience_seconds=patience_seconds)  # type: ignore[arg-type]
    assert isinstance(made(arrival()), WaitUntil) is (away == 2)
    assert ("this worker knows no holds" in caplog.text) is (away > 2)


def test_a_worker_sends_an_event_when_other_holds_count() -> None:
    sent: list[Any] = []
    dispatcher = SimpleNamespace(
        enabled=True, producer=None, publish=lambda event, fields, _: sent.append((event, fields))
    )
    looks: list[Any] = []
    timer = SimpleNamespace(call_repeatedly=lambda _, look: looks.append(look))
    made, state = Holding(lambda arrival: ()), State(HOLD)
    consumer = SimpleNamespace(timer=timer, event_dispatcher=dispatcher)
    made.begin(state, consumer, patience_seconds=9)  # type: ignore[arg-type]
    fields = {"holds": [{"name": "shop.*", "mode": "hold", "by": "ada@web1"}]}
    assert sent == [("delay-holds", fields)]
    state.holds = (replace(HOLD, next_us=NOW_US),)
    wait_until(lambda: looks[0]() or made._holds == state.holds)
    looks[0]()
    assert len(sent) == 1, "a release that goes on is no news"
    state.holds = ()

    def looked() -> bool:
        looks[0]()
        return len(sent) == 2

    wait_until(looked)
    assert sent[1:] == [("delay-holds", {"holds": []})]
    made.close()
