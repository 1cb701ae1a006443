"""The gates of a worker, one by one, and those of an app that drains or is off."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery, signals

from celery_native_delay import Delay, KeyedResult, install
from celery_native_delay.errors import StoreUnavailable
from celery_native_delay.message import Delayed
from celery_native_delay.now import utc_now
from celery_native_delay.records.cancelled import note_cancelled
from celery_native_delay.schedules.state import HEADER as OCCURRENCE
from celery_native_delay.settings import DelaySettings
from celery_native_delay.store.opened import store_at
from celery_native_delay.worker.arrival import AWAY_US, Announce, Arrival, AskAgain, Drop, WaitUntil
from celery_native_delay.worker.gates import Revoked, cancelled, early, expired, gates
from celery_native_delay.worker.scheduling import LeftToBeat, Scheduling

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


def revoked(state: Any) -> Revoked:
    gate = Revoked()
    gate.state = state
    return gate


def test_a_task_cancelled_while_it_waited_in_the_broker_is_announced_each_time_it_comes(
    tmp_path: Path,
) -> None:
    """The broker may deliver it again before the worker has acknowledged it."""
    with closing(store_at(f"sqlite:///{tmp_path}/s.db", "d", timeout_seconds=5)) as store:
        note_cancelled(store.state, "1", kept_us=1 << 60)
        gate = revoked(store.state)
        for _ in range(2):
            assert gate(arrival(WAITED)) == Announce()
        assert gate(arrival(WAITED, id="2")) is None
        assert gate(arrival()) is None, "it did not wait"
        assert gate(arrival(WAITED._replace(stored=True))) is None, "it waited in the store"
    assert revoked(None)(arrival(WAITED)) is None, "there is no store, or all tasks wait in it"


def test_a_task_that_waited_in_the_broker_waits_while_the_store_is_away() -> None:
    away = Mock(read=Mock(side_effect=StoreUnavailable("it is down")))
    waits = WaitUntil(NOW_US + AWAY_US, "d-1", AskAgain(5.0, beside_prefetch=True), in_broker=True)
    assert revoked(away)(arrival(WAITED)) == waits


def test_the_order_of_the_gates() -> None:
    """An early task asks no store; a task that will not run takes no turn, claim or lock."""
    names = ("revoked", "scheduling", "holding", "rated", "once", "unique")
    given: dict[str, Any] = {name: lambda _, name=name: name for name in names}
    passed = gates(DelaySettings(), **given)
    order = [next((name for name in names if given[name] is gate), gate) for gate in passed]
    ours = [early, "revoked", "scheduling", cancelled, expired]
    assert order == [*ours, "holding", "rated", "once", "unique"]
    assert gates(DelaySettings(), once=given["once"]) == (early, cancelled, expired, given["once"])


# ---- drained, and off ----------------------------------------------------------------------------


both = pytest.mark.parametrize("enabled", ["drain", False])


def remind() -> None: ...


def app_with(enabled: object, queue: str = "celery") -> Celery:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.task_default_queue = queue
    app.task(name="shop.remind")(remind)
    return install(app, enabled=enabled)


@both
def test_keyed_calls_send_plain_tasks(enabled: object) -> None:
    """Each is due when the first of several calls would be: a caller's code need not change."""
    app = app_with(enabled, f"keyed-{enabled}")
    delay, signature = Delay(app), app.signature("shop.remind")
    before = utc_now()
    results = [
        delay.debounce(signature, key="a", seconds=600),
        delay.throttle(signature, key="a", seconds=600),
        delay.throttle(signature, key="a", seconds=600, edge="trailing"),
        delay.unique(signature, key="a"),
        delay.unique(signature, key="a", countdown=600),
        delay.unique(signature, key="a", eta=before + timedelta(seconds=600)),
    ]
    found = []
    with app.connection_for_read() as connection:
        for result in results:
            assert isinstance(result, KeyedResult)
            assert (result.created, result.replaced) == (True, None)
            message = connection.default_channel.basic_get(app.conf.task_default_queue)
            assert message.headers["id"] == result.id
            assert not [name for name in message.headers if name.startswith("native_delay")]
            found.append(message.headers["eta"])
    waits = [eta and datetime.fromisoformat(eta) - before for eta in found]
    assert [bool(wait) for wait in waits] == [True, False, True, False, True, True]
    assert all(590 < wait.total_seconds() < 660 for wait in waits if wait)


@both
def test_beat_sends_schedule_entries_again(enabled: object) -> None:
    app = app_with(enabled)
    app.conf.native_delay_schedules = True
    service = Mock(app=app, scheduler="Celery's own")
    signals.beat_init.send(sender=service)
    assert service.scheduler == "Celery's own"


def test_a_draining_worker_leaves_occurrences_to_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other apps in the same namespace still run: their beat stands still."""
    asked = Mock(return_value=None)
    monkeypatch.setattr(Scheduling, "__call__", asked)
    gate = LeftToBeat(app_with("drain"), Mock())

    def occurrence_in(app: str) -> Arrival:
        mark: dict[str, Any] = {"v": 1, "app": app, "entry": "report", "number": 7}
        return arrival(WAITED, **{OCCURRENCE: mark})

    assert isinstance(gate(occurrence_in("shop")), Drop)
    asked.assert_not_called()
    others = occurrence_in("bills")
    assert gate(others) is None
    asked.assert_called_once_with(others)
    gate.close()


def test_a_draining_worker_holds_new_tasks_and_puts_back_those_that_already_waited() -> None:
    settings = DelaySettings(enabled="drain")
    early, *_ = gates(settings, revoked=Revoked())
    assert early(arrival(eta=IN_A_MINUTE)) is None
    waits = WAITED._replace(due_us=NOW_US + 60_000_000)
    assert isinstance(early(arrival(waits, eta=IN_A_MINUTE)), WaitUntil)
    assert early(arrival(WAITED, eta=IN_A_MINUTE)) is None, "of the user's transaction"
