"""The gates of a worker, one by one: the ruling of each on a received task."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_native_delay.errors import StoreUnavailable
from celery_native_delay.message import Delayed
from celery_native_delay.records.interface import RecordName, Snapshot
from celery_native_delay.settings import DelaySettings
from celery_native_delay.worker.arrival import (
    AWAY_US,
    Announce,
    Arrival,
    AskAgain,
    Drop,
    WaitUntil,
)
from celery_native_delay.worker.gates import Revoked, cancelled, early, expired, gates

NOW_US = 1_795_176_000_000_000
IN_A_MINUTE = "2026-11-20T12:01:00+00:00"
WAITED = Delayed("d-1", NOW_US, "", "celery")


def arrival(delayed: Delayed | None = None, **headers: Any) -> Arrival:
    message = SimpleNamespace(headers={"id": "1", "task": "t", **headers}, native_delay=delayed)
    return Arrival(message, message.headers, None, NOW_US)


@pytest.mark.parametrize(("late_ms", "drops"), [(0, False), (1, True)])
def test_an_expired_message_is_dropped(late_ms: int, drops: bool) -> None:
    over = WAITED._replace(expires_ms=NOW_US // 1000 - late_ms)
    assert expired(arrival(over)) == (Drop("it has expired", expired=True) if drops else None)
    assert expired(arrival(over, expires=IN_A_MINUTE)) is None, "Celery's own"
    assert expired(arrival(WAITED)) is None


def test_an_early_task_waits_in_the_broker() -> None:
    assert early(arrival(eta=IN_A_MINUTE)) == WaitUntil(NOW_US + 60_000_000)
    again = WaitUntil(NOW_US + 60_000_000, "d-1")
    assert early(arrival(WAITED, eta=IN_A_MINUTE)) == again, "a mark must find it when it is due"
    assert early(arrival()) is None
    assert early(arrival(WAITED._replace(cancelled=True), eta=IN_A_MINUTE)) is None


class State:
    """The state in a store that knows one cancelled task, or does not answer."""

    def __init__(self, *, away: bool = False) -> None:
        self.texts: dict[RecordName, str | None] = {RecordName("cancelled", "1"): "1"}
        self.away = away

    def read(self, name: RecordName) -> Snapshot:
        if self.away:
            raise StoreUnavailable("it is down")
        return Snapshot(NOW_US, self.texts.get(name))

    def change(self, name: RecordName, decide: Any) -> Any:
        change = decide(self.read(name))
        self.texts[name] = change.text
        return change.answer


def revoked(state: State | None) -> Revoked:
    gate = Revoked()
    gate.state = state  # type: ignore[assignment]
    return gate


def test_a_task_cancelled_while_it_waited_in_the_broker_is_announced_each_time_it_comes() -> None:
    """The broker may deliver it again before the worker has acknowledged it."""
    gate = revoked(State())
    for _ in range(2):
        assert gate(arrival(WAITED)) == Announce()
    assert gate(arrival(WAITED, id="2")) is None
    assert gate(arrival()) is None, "it did not wait"
    assert gate(arrival(WAITED._replace(stored=True))) is None, "it waited in the store"
    assert revoked(None)(arrival(WAITED)) is None, "there is no store, or all tasks wait in it"


def test_a_task_that_waited_in_the_broker_waits_while_the_store_is_away() -> None:
    waits = WaitUntil(NOW_US + AWAY_US, "d-1", AskAgain(5.0, beside_prefetch=True), in_broker=True)
    assert revoked(State(away=True))(arrival(WAITED)) == waits


def test_the_order_of_the_gates() -> None:
    """An early task asks no store; a task that will not run takes no turn, claim or lock."""
    names = ("revoked", "scheduling", "holding", "rated", "once", "unique")
    given: dict[str, Any] = {name: lambda _, name=name: name for name in names}
    passed = gates(DelaySettings(), **given)
    order = [next((name for name in names if given[name] is gate), gate) for gate in passed]
    ours = [early, "revoked", "scheduling", cancelled, expired]
    assert order == [*ours, "holding", "rated", "once", "unique"]
    assert gates(DelaySettings(), once=given["once"]) == (early, cancelled, expired, given["once"])
