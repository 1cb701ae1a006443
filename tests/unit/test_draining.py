"""``native_delay_enabled`` is "drain" or False: nothing new is delayed, and no call breaks."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery, signals

from celery_native_delay import Delay, KeyedResult, install
from celery_native_delay.now import utc_now
from celery_native_delay.schedules.state import HEADER as OCCURRENCE
from celery_native_delay.settings import DelaySettings
from celery_native_delay.worker.arrival import Arrival, Drop, WaitUntil
from celery_native_delay.worker.gates import Revoked, gates
from celery_native_delay.worker.scheduling import LeftToBeat, Scheduling
from tests.unit.test_gates import IN_A_MINUTE, WAITED, arrival

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


def test_a_draining_worker_drops_occurrences_that_beat_sends_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    assert isinstance(early(arrival(WAITED, eta=IN_A_MINUTE)), WaitUntil)
