"""``celery delay schedules`` and the doctor's checks of schedules, on Redis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker

from celery_native_delay import Delay, NoRecords, install
from celery_native_delay.app.doctor import examine
from celery_native_delay.app.schedules import Schedules, _name
from celery_native_delay.now import time_ns
from celery_native_delay.records.interface import Change
from celery_native_delay.schedules.state import KEPT_US, State
from celery_native_delay.testing import PrivateRedis
from tests.integration.project import APP, Project

# Each command is a process, which takes seconds on a busy machine.
pytestmark = pytest.mark.timeout(300)

on_redis = pytest.mark.parametrize("server_name", ["redis"], indirect=True)

ENTRIES: dict[str, Any] = {
    "nightly": {"task": "shop.report", "schedule": 86_400.0},
    "tick": {"task": "shop.tick", "schedule": 900.0},
}


def app_on(url: str, **conf: Any) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update({"beat_schedule": ENTRIES, "result_expires": None} | conf)
    return install(app, schedules=True)


@on_redis
def test_entries_are_listed_paused_resumed_run_and_removed(
    tmp_path: Path, empty_redis: PrivateRedis
) -> None:
    shop = Project(tmp_path).write(APP, empty_redis.url, schedules=True)
    none = "no schedule entries: a worker with native_delay_schedules publishes them"
    assert shop.lines("schedules") == [none]
    with app_on(empty_redis.url) as app:
        schedules = Schedules(app)
        schedules.publish()
        schedules.publish()
        assert Delay(app).count() == 2
        heading, nightly, tick = shop.lines("schedules")
        assert heading == "name task schedule last run next due runs"
        assert nightly.startswith("nightly shop.report every 1 d 20")
        assert tick.startswith("tick shop.tick every 15 min 20")
        told = shop.told("schedules")
        assert [each["name"] for each in told] == ["nightly", "tick"]
        assert told[0]["next_due"]

        assert shop.lines("schedules", "pause", "tick") == ["tick paused"]
        assert Delay(app).count() == 1
        assert shop.lines("schedules")[2] == "tick shop.tick every 15 min paused 0"
        assert shop.lines("schedules", "resume", "tick") == ["tick resumed"]
        assert Delay(app).count() == 2
        assert shop.told("schedules", "run-now", "tick")["task_id"]
        assert Delay(app).count() == 2, "the run is due now, and the next run stays"
        assert shop.lines("schedules", "--remove-all") == ["2 schedule entries removed"]
        assert Delay(app).count() == 0
        assert list(Delay(app).schedules()) == []


@on_redis
def test_a_wrong_name_is_answered_with_the_known_names(empty_redis: PrivateRedis) -> None:
    with app_on(empty_redis.url) as app:
        schedules = Schedules(app)
        schedules.publish()
        for change in (schedules.pause, schedules.resume, schedules.run_now):
            with pytest.raises(KeyError, match=r"got 'tock'; known: nightly, tick"):
                change("tock")


@on_redis
def test_the_doctor_finds_entries_that_are_missing_overdue_or_sent_by_a_beat(
    empty_redis: PrivateRedis,
) -> None:
    def found(app: Celery) -> list[str]:
        return [each.problem for each in examine(app) if each.check == "schedules"]

    with app_on(empty_redis.url) as app:
        assert found(app) == [
            f"no worker has published the schedule entry {name}" for name in sorted(ENTRIES)
        ]
        schedules = Schedules(app)
        schedules.publish()
        assert found(app) == []

        late = replace(schedules._known("tick"), due_us=time_ns() // 1000 - 300_000_000)
        change = Change(late.encoded(), time_ns() // 1000 + KEPT_US, None)
        schedules._ask(lambda records: records.change(_name("tick"), lambda _: change))
        assert found(app) == ["tick is overdue by 5 min"]
        assert State.from_text(late.encoded()) == late

        schedules.remove_all()
        schedules.publish()
        schedules.note_beat("shop.of_another_app")
        assert found(app) == []
        schedules.note_beat("nightly")
        assert found(app) == ["a celery beat without native_delay_schedules also sends nightly"]


@on_redis
def test_an_entry_that_cannot_be_sent_leaves_the_others(
    empty_redis: PrivateRedis, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {
        "far": {"task": "shop.far", "schedule": 86_400 * 3650.0},
        "odd": {"task": "shop.odd", "schedule": 900.0, "args": [object()]},
    }
    with app_on(empty_redis.url, beat_schedule={**wrong, **ENTRIES}) as app:
        Schedules(app).publish()
        assert [entry.name for entry in Delay(app).schedules()] == ["nightly", "tick"]
        assert Delay(app).count() == 2
    assert "schedule entry far is not published: " in caplog.text
    assert "schedule entry odd is not published: " in caplog.text


def test_rabbitmq_without_records_refuses_schedules(vhost_url: str) -> None:
    with app_on(vhost_url) as app, pytest.raises(NoRecords, match="native_delay_records"):
        list(Delay(app).schedules())


def test_celerys_start_worker_raises_the_error_about_schedules(vhost_url: str) -> None:
    """The worker runs in a thread; without the error start_worker would wait for ever."""
    with app_on(vhost_url) as app, pytest.raises(NoRecords, match="native_delay_schedules"):
        with start_worker(app, perform_ping_check=False):
            pass
