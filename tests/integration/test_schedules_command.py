"""``celery delay schedules`` and the doctor's checks of schedules, on Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import pytest
from celery import Celery, Task
from celery.contrib.testing.worker import start_worker
from celery.schedules import BaseSchedule, crontab
from celery.signals import before_task_publish

from celery_native_delay import CannotDelay, Delay, SettingsError, install
from celery_native_delay.app.doctor import examine
from celery_native_delay.app.schedules import Schedules
from celery_native_delay.now import time_ns
from celery_native_delay.records.interface import Change
from celery_native_delay.schedules.state import KEPT_US, State
from celery_native_delay.testing import PrivateRedis
from tests.integration.project import APP, Project
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.parametrize("server_name", ["redis"], indirect=True)

ENTRIES: dict[str, Any] = {
    "nightly": {"task": "shop.report", "schedule": 86_400.0},
    "tick": {"task": "shop.tick", "schedule": 900.0},
}


def app_on(url: str, *, name: str = "shop", **conf: Any) -> Celery:
    app = Celery(name, broker=url, set_as_current=False)
    app.conf.update({"beat_schedule": ENTRIES} | conf)
    return install(app, schedules=True)


@pytest.fixture
def app(empty_redis: PrivateRedis) -> Iterator[Celery]:
    with app_on(empty_redis.url) as app:
        yield app


@pytest.fixture
def shop(tmp_path: Path, empty_redis: PrivateRedis) -> Project:
    return Project(tmp_path).write(APP, empty_redis.url, schedules=True)


@pytest.fixture
def schedules(app: Celery) -> Schedules:
    """The published entries of the app."""
    schedules = Schedules(app)
    schedules.publish()
    return schedules


def test_entries_are_listed_paused_resumed_run_and_removed(shop: Project, app: Celery) -> None:
    none = "no schedule entries: a worker with native_delay_schedules publishes them"
    assert shop.lines("schedules") == [none]
    schedules = Schedules(app)
    schedules.publish()
    schedules.publish()
    assert Delay(app).count() == 2
    heading, nightly, tick = shop.lines("schedules")
    assert heading == "name task schedule last run next due runs from"
    assert nightly.startswith("nightly shop.report every 1 d 20")
    assert tick.startswith("tick shop.tick every 15 min 20")
    told = shop.told("schedules")
    assert [each["name"] for each in told] == ["nightly", "tick"]
    assert told[0]["next_due"]

    assert shop.lines("schedules", "pause", "tick") == ["tick paused"]
    assert Delay(app).count() == 1
    assert shop.lines("schedules")[2] == "tick shop.tick every 15 min paused 0 code"
    assert shop.lines("schedules", "resume", "tick") == ["tick resumed"]
    assert Delay(app).count() == 2
    assert shop.told("schedules", "run-now", "tick")["task_id"]
    assert Delay(app).count() == 2, "the run is due now, and the next run stays"
    assert shop.lines("schedules", "--remove-all", "--yes") == ["2 schedule entries removed"]
    assert Delay(app).count() == 0
    assert list(Delay(app).schedules()) == []


def test_entries_are_added_changed_and_removed_at_run_time(
    shop: Project, empty_redis: PrivateRedis
) -> None:
    """They survive a deployment, and the entries of the code are not touched."""
    with app_on(empty_redis.url) as app:
        Schedules(app).publish()
        assert shop.lines("schedules", "add", "report", "shop.report", "30 2 * * *") == [
            "report added"
        ]
        every = ("shop.tick", "every 10 min", "--args", "[7]", "--options", '{"queue": "slow"}')
        assert shop.told("schedules", "add", "often", *every)["name"] == "often"
        assert shop.lines("schedules")[2].startswith("often shop.tick every 10 min 20")
        assert [each.is_added for each in Delay(app).schedules()] == [False, True, True, False]
        (waiting,) = Delay(app).ls("queue:slow")
        assert (waiting.name, waiting.args) == ("shop.tick", "[7]")

        assert shop.lines("schedules", "change", "often", "--kwargs", '{"user": 1}') == [
            "often changed"
        ]
        (changed,) = Delay(app).ls("queue:slow")
        assert (changed.kwargs, changed.due_us) == ("{'user': 1}", waiting.due_us)
        for arguments, said in (
            (("add", "often", "shop.tick", "every 1 s"), "change or remove this entry"),
            (("add", "tick", "shop.tick", "every 1 s"), "the app's code has this entry"),
            (("add", "new", "shop.tick", "now and then"), "'every 10 s', '30 2 * * *'"),
            (("add", "new", "shop.tick", "every 300000000000 s"), "that is due some day"),
            (("add", "new", *every[:2], "--options", '{"countdown": "5"}'), "countdown '5'"),
            (("add", "new", *every[:2], "--options", '{"serializer": "x"}'), "No encoder"),
            (("change", "often", "--options", '{"expires": "soon"}'), "got {'expires': 'soon'}"),
            (("change", "tick", "--task", "shop.note"), "change beat_schedule"),
            (("remove", "tick", "--yes"), "change beat_schedule"),
            (("change", "unknown", "--task", "x"), "known: nightly, often, report, tick"),
        ):
            done = shop.delay("schedules", *arguments)
            assert (done.returncode, said in done.stderr) == (1, True), (arguments, done.stderr)
    with app_on(empty_redis.url, beat_schedule={"new": ENTRIES["tick"]}) as app:
        release = Schedules(app)
        release.publish()
        assert [each.name for each in release] == ["new", "often", "report"]
        Delay(app).cancel(changed.id)
        occurrence = Delay(app).ls("queue:slow")
        assert occurrence.tasks == (), "a worker publishes the next one when it gets the cancelled"
    assert shop.delay("schedules", "remove", "often", answer="n\n").returncode == 1
    assert shop.lines("schedules", "remove", "often", "--yes") == ["often removed"]
    assert [each["name"] for each in shop.told("schedules")] == ["new", "report"]


def test_an_added_entry_runs_and_its_lost_message_is_replaced(empty_redis: PrivateRedis) -> None:
    with app_on(empty_redis.url, beat_schedule={}) as app:
        schedules = Delay(app).schedules()
        schedules.add("report", "shop.report", "every 1 d")
        Schedules(app).publish()
        (first,) = Delay(app).ls()
        assert Schedules(app).advance("report", 1, first.id, redelivered=False) is None
        assert [each.runs for each in schedules] == [1]
        assert Delay(app).count() == 1, "the next run replaced the first one"
        app.conf.beat_schedule = {"report": {"task": "shop.other", "schedule": 60.0}}
    with app_on(empty_redis.url, beat_schedule={"report": ENTRIES["tick"]}) as app:
        Schedules(app).publish()
        (of_code,) = Delay(app).schedules()
        assert (of_code.task, of_code.is_added) == ("shop.tick", False), "the code's entry wins"


def test_entries_of_redbeat_are_imported_once(shop: Project, empty_redis: PrivateRedis) -> None:
    """With the due time that RedBeat's interval has; what cannot be imported says why."""
    crontab = {"minute": "30", "hour": "2", "day_of_week": "*", "day_of_month": "*"}
    last_run = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
    parts = ("year", "month", "day", "hour", "minute", "second", "microsecond")
    time_of_run = {part: getattr(last_run, part) for part in parts}
    entries: dict[str, Any] = {
        "weekly": {"__type__": "interval", "every": 604_800.0, "relative": False},
        "cron": {"__type__": "crontab", "month_of_year": "*", **crontab},
        "rule": {"__type__": "rrule", "freq": 4},
        "static": {"__type__": "interval", "every": 60.0, "relative": False},
    }
    for name, when in entries.items():
        definition = {"name": name, "task": "shop.report", "args": [name], "schedule": when}
        run = {"__type__": "datetime", "timezone": "UTC", **time_of_run}
        fields = {
            "definition": json.dumps(definition | {"enabled": name != "cron"}),
            "meta": json.dumps({"last_run_at": run, "total_run_count": 4}),
        }
        empty_redis.client.hset(f"redbeat:{name}", mapping=fields)
        empty_redis.client.zadd("redbeat::schedule", {f"redbeat:{name}": 0})
    empty_redis.client.sadd("redbeat::statics", "static")
    *rows, said = shop.lines("schedules", "import", "redbeat", "--dry-run")
    assert said == "2 of 3 schedule entries of redbeat would be added"
    assert rows[1].endswith("would be added paused")
    assert "an interval or a crontab" in rows[2]
    assert shop.told("schedules") == []
    assert shop.told("schedules", "import", "redbeat")["count"] == 2
    cron, weekly = shop.told("schedules")
    assert (cron["schedule"], cron["is_paused"]) == ("30 2 * * * UTC", True)
    assert datetime.fromisoformat(weekly["next_due"]) == last_run + timedelta(days=7)
    assert shop.told("schedules", "import", "redbeat")["count"] == 0


def test_a_wrong_name_is_answered_with_the_known_names(schedules: Schedules) -> None:
    for change in (schedules.pause, schedules.resume, schedules.run_now):
        with pytest.raises(KeyError, match=r"got 'tock'; known: nightly, tick"):
            change("tock")


def schedule_problems(app: Celery) -> list[str]:
    return [each.problem for each in examine(app) if each.check == "schedules"]


def test_the_doctor_finds_entries_that_are_missing_overdue_unseen_or_sent_by_a_beat(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert schedule_problems(app) == [
        f"no worker has published the schedule entry {name}" for name in sorted(ENTRIES)
    ]
    schedules = Schedules(app)
    schedules.publish()
    assert schedule_problems(app) == []

    late = replace(schedules._known("tick"), due_us=time_ns() // 1000 - 300_000_000)
    change = Change(late.encoded(), time_ns() // 1000 + KEPT_US, None)
    schedules._ask(lambda records: records.change(schedules._name("tick"), lambda _: change))
    assert schedule_problems(app) == ["tick is overdue by 5 min"]
    assert State.from_text(late.encoded()) == late

    schedules.remove_all()
    schedules.publish()
    schedules.note_beat("shop.of_another_app")
    assert schedule_problems(app) == []
    schedules.note_beat("nightly")
    (problem,) = schedule_problems(app)
    assert problem == "a celery beat without native_delay_schedules also sends nightly"

    monkeypatch.setattr("celery_native_delay.app.doctor._UNSEEN_SECONDS", 0)
    told = "no worker has checked the schedule entries for "
    assert any(problem.startswith(told) for problem in schedule_problems(app))


def test_apps_of_one_namespace_keep_their_entries(empty_redis: PrivateRedis) -> None:
    """Also entries of the same name, and also if a worker of one app gets the other's message."""
    entries = {"tick": {"task": "till.tick", "schedule": 60.0}}
    with (
        app_on(empty_redis.url) as shop,
        app_on(empty_redis.url, name="till", beat_schedule=entries) as till,
    ):
        of_shop, of_till = Schedules(shop), Schedules(till)
        for _ in range(2):
            of_shop.publish()
            of_till.publish()
        assert [entry.task for entry in of_shop] == ["shop.report", "shop.tick"]
        assert [entry.task for entry in of_till] == ["till.tick"]
        assert Delay(shop).count() == 3
        assert schedule_problems(shop) == schedule_problems(till) == []

        number = of_shop._known("tick").number
        received_by_till = of_till.of("shop")
        assert received_by_till.advance("tick", number, "run", redelivered=False) is None
        assert [entry.runs for entry in of_shop] == [0, 1]
        assert [entry.runs for entry in of_till] == [0]

        assert of_till.remove_all() == 1
        assert Delay(shop).count() == 2
        of_shop._remove(of_shop._release_name)
        gone = received_by_till.advance("tick", number + 1, "run", redelivered=False)
        assert gone == "its app 'shop' has no worker any more"


def test_two_apps_of_one_name_are_told_by_the_doctor_and_in_both_logs(
    empty_redis: PrivateRedis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"close": {"task": "till.close", "schedule": 60.0}}
    with app_on(empty_redis.url) as shop, app_on(empty_redis.url, beat_schedule=entries) as till:
        of_shop, of_till = Schedules(shop), Schedules(till)

        def look() -> list[str]:
            caplog.clear()
            of_shop.publish()
            of_till.publish()
            return caplog.messages

        look()
        assert look() == [], "it may be a deployment"
        monkeypatch.setattr("celery_native_delay.schedules.release.RIVAL_US", 0)
        text = "native delay: another configuration of the app 'shop' runs, too: nightly, tick do "
        assert look() == [f"{text}not run"] * 2
        assert look() == [], "said once"
        for app in (shop, till):
            (problem,) = (each for each in schedule_problems(app) if "two configurations" in each)
            assert "one has the schedule entries nightly, tick, and has no say" in problem


class Never(BaseSchedule):
    def remaining_estimate(self, last_run_at: Any) -> Any:
        raise ZeroDivisionError("no such day")


#: Entries that cannot run, and the reason that is shown.
WRONG_ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "far": ({"task": "shop.far", "schedule": 86_400 * 3650.0}, "a delay of "),
    "keys": ({"task": "shop.keys", "schedule": 9.0, "kwargs": {1: 2, "a": 3}}, "TypeError: "),
    "misspelt": ({"task": "shop.misspelt", "schedule": 9.0, "arg": [1]}, "TypeError: "),
    "never": ({"task": "shop.never", "schedule": Never()}, "ZeroDivisionError: no such day"),
    "none": ({"task": "shop.none", "schedule": crontab(minute=[])}, "expected at least one minute"),
    "odd": ({"task": "shop.odd", "schedule": 900.0, "args": [object()]}, "EncodeError: "),
    "text": ({"task": "shop.text", "schedule": "daily"}, "AttributeError: "),
    "zero": ({"task": "shop.zero", "schedule": 0.0}, "expected an interval above 0 s, got 0 s"),
}


def test_an_entry_that_cannot_run_is_a_row_with_a_reason_and_leaves_the_others(
    shop: Project, empty_redis: PrivateRedis, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {name: fields for name, (fields, _) in WRONG_ENTRIES.items()}
    listed = {"listed": {"task": "shop.listed", "schedule": crontab(minute=[0, 30])}}
    with app_on(empty_redis.url, beat_schedule={**wrong, **listed, **ENTRIES}) as app:
        Schedules(app).publish()
        Schedules(app).publish()
        assert Delay(app).count() == 3
        entries = {entry.name: entry for entry in Delay(app).schedules()}
        assert sorted(entries) == sorted({*wrong, *listed, *ENTRIES})
        found = {*schedule_problems(app)}
    assert entries["listed"].schedule == "0,30 * * * * UTC"
    for name, (_, reason) in WRONG_ENTRIES.items():
        problem = entries[name].problem
        assert problem is not None
        assert problem.startswith(reason)
        assert f"the schedule entry {name} does not run: {problem}" in found
        assert f"schedule entry {name} is not published: {reason}" in caplog.text
    assert len(found) == len(wrong)

    rows = {line.split()[0]: line for line in shop.lines("schedules")}
    assert rows["zero"].endswith("expected an interval above 0 s, got 0 s 0 code")
    assert "shop.report every 1 d 20" in rows["nightly"]


def test_an_entry_whose_name_is_no_text_leaves_the_others(empty_redis: PrivateRedis) -> None:
    """Celery's beat takes any name. A store cannot hold each."""
    tick = {"task": "shop.tick", "schedule": 900.0}
    with app_on(empty_redis.url, beat_schedule={7: tick, "a\udc80": tick, "b\0": tick}) as app:
        Schedules(app).publish()
        entries = [(entry.name, entry.problem) for entry in Delay(app).schedules()]
        assert entries == [("7", None), ("a?", None), ("b\ufffd", None)]
        assert Delay(app).count() == 3


def test_an_eager_app_runs_no_task_before_it_is_due(empty_redis: PrivateRedis) -> None:
    ran: list[str] = []
    with app_on(empty_redis.url, task_always_eager=True) as app:
        for name in ("shop.tick", "shop.report"):
            app.task(putting(name, ran.append), name=name, shared=False)
        Schedules(app).publish()
        assert ran == []
        problems = {entry.problem for entry in Delay(app).schedules()}
        assert problems == {"expected task_always_eager off: with it, a run cannot wait"}
        with pytest.raises(CannotDelay, match="task_always_eager off"):
            Delay(app).schedules().add("weekly", "shop.report", "0 6 * * 1")
        assert ran == []


def test_an_expiry_of_the_task_counts_from_the_time_of_the_schedule(
    empty_redis: PrivateRedis,
) -> None:
    """An expiry of its decorator, and of its annotations."""
    sent: list[dict[str, Any]] = []

    def note(headers: dict[str, Any], **_: Any) -> None:
        sent.append(headers)

    before_task_publish.connect(note)  # which refers to it weakly
    options = {"options": {"countdown": 900}, "schedule": 86_400.0}
    entries = {name: {"task": f"shop.{name}", **options} for name in ("decorated", "noted")}
    annotations = {"shop.noted": {"expires": 600}}
    with app_on(empty_redis.url, beat_schedule=entries, task_annotations=annotations) as app:
        app.task(no_work, name="shop.decorated", expires=600)
        app.task(no_work, name="shop.noted")
        Schedules(app).publish()
        due = {each.task: each.next_due for each in Delay(app).schedules()}
    assert sorted(headers["task"] for headers in sent) == sorted(due)
    for headers in sent:
        expires = datetime.fromisoformat(headers["expires"]) - due[headers["task"]]
        assert expires.total_seconds() == pytest.approx(600 - 900, abs=0.1)


def test_the_expiration_of_the_message_counts_from_the_time_of_the_schedule(
    empty_redis: PrivateRedis,
) -> None:
    sent: list[float] = []

    def note(properties: dict[str, Any], **_: Any) -> None:
        sent.append(properties["expiration"])

    before_task_publish.connect(note)  # which refers to it weakly
    options = {"countdown": 900, "expiration": 60}
    tick = {"task": "shop.tick", "schedule": 3600.0, "options": options}
    with app_on(empty_redis.url, beat_schedule={"tick": tick}) as app:
        Schedules(app).publish()
        (due,) = [each.next_due for each in Delay(app).schedules()]
    assert due is not None
    assert sent == [pytest.approx(due.timestamp() - 900 + 60 - time(), abs=PATIENCE_SECONDS)]


def no_work() -> None:
    """A task that does nothing."""


def putting(value: str, put: Callable[[str], None]) -> Callable[[], None]:
    """A task that puts *value* somewhere."""

    def run() -> None:
        put(value)

    return run


class Refusing(Task):  # type: ignore[misc]
    """A task class that sends nothing while a run waits or runs, as celery-once does."""

    def apply_async(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("already queued")


def test_a_run_is_published_without_the_apply_async_of_its_class_until_it_is_due(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    app.task(no_work, name="shop.tick", base=Refusing)
    app.task(no_work, name="shop.report")
    schedules = Schedules(app)
    schedules.publish()
    first = schedules._known("tick")
    assert first.problem is None
    assert schedules.advance("tick", first.number, "run-1", redelivered=False) is None
    second = schedules._known("tick")
    assert (second.runs, second.number, Delay(app).count()) == (1, 2, 2)
    told = schedules.send_anew("tick", "shop.tick", "run-1")
    assert told == "apply_async of its class raised RuntimeError: already queued"
    assert schedules.send_anew("nightly", "shop.report", "run-1") is None
    assert schedules.send_anew("nightly", "shop.unknown", "run-1") is None
    with pytest.raises(RuntimeError, match="already queued"):
        schedules.run_now("tick")
    assert "a run of schedule entry tick is not sent: RuntimeError: already queued" in caplog.text


def test_a_next_run_that_is_refused_does_not_hold_up_the_present_one(
    empty_redis: PrivateRedis,
) -> None:
    refusing: list[bool] = []

    def route(*_: Any, **__: Any) -> None:
        if refusing:
            raise RuntimeError("no such tenant")

    with app_on(empty_redis.url, task_routes=[route]) as app:
        schedules = Schedules(app)
        schedules.publish()
        first = schedules._known("tick")
        refusing.append(True)
        assert schedules.advance("tick", first.number, "run-1", redelivered=False) is None
        schedules.publish()
        _, tick = schedules
        assert (tick.runs, tick.problem) == (1, "RuntimeError: no such tenant")
        assert Delay(app).count() == 1
        refusing.clear()
        schedules.publish()
        _, after = schedules
        assert after.next_due == tick.next_due
        assert (after.problem, Delay(app).count()) == (None, 2)


@pytest.mark.parametrize("ahead_seconds", [20, -20])
def test_a_worker_with_a_wrong_clock_skips_no_due_time(
    empty_redis: PrivateRedis, monkeypatch: pytest.MonkeyPatch, ahead_seconds: int
) -> None:
    """The clock of the records decides, as for keys and rates."""
    with app_on(empty_redis.url, beat_schedule={"tick": {"task": "t", "schedule": 10.0}}) as app:
        schedules = Schedules(app)
        schedules.publish()
        first = schedules._known("tick")
        wrong = partial(int, time_ns() + ahead_seconds * 10**9)
        monkeypatch.setattr("celery_native_delay.app.schedules.time_ns", wrong)
        schedules.advance("tick", first.number, "run-1", redelivered=False)
        second = schedules._known("tick")
        assert first.due_us is not None
        assert second.due_us == first.due_us + 10_000_000
        (tick,) = schedules
        assert tick.last_run is not None
        assert abs(tick.last_run.timestamp() - time()) < 10
        assert tick.late_seconds == 0


def test_an_entry_goes_on_with_its_waiting_run_after_its_records_were_lost(
    schedules: Schedules, empty_redis: PrivateRedis
) -> None:
    number = schedules._known("tick").number
    keys = [key for key in empty_redis.client.scan_iter() if b".schedule" in key]
    assert len(keys) == 3
    empty_redis.client.delete(*keys)
    assert schedules.advance("tick", number, "run-1", redelivered=False) is None
    told = schedules.advance("of another release", number, "run-1", redelivered=False)
    assert str(told).startswith("another occurrence")
    after = schedules._known("tick")
    assert (after.number, after.runs) == (number + 1, 1)
    schedules.publish()
    assert schedules._known("tick") == after
    assert [entry.problem for entry in schedules] == [None, None]


def test_celerys_own_entry_that_cleans_the_result_backend_is_published(
    tmp_path: Path, empty_redis: PrivateRedis
) -> None:
    backend = {"result_backend": f"db+sqlite:///{tmp_path}/results.db", "result_expires": 60}
    with app_on(empty_redis.url, **backend) as app:
        Schedules(app).publish()
        names = [entry.name for entry in Delay(app).schedules()]
    assert names == ["celery.backend_cleanup", *sorted(ENTRIES)]


def test_a_scheduler_that_cannot_be_read_is_a_problem_and_stops_the_worker(
    empty_redis: PrivateRedis,
) -> None:
    with app_on(empty_redis.url, beat_scheduler="djnago") as app:
        (problem,) = schedule_problems(app)
        assert problem.startswith("expected beat_scheduler to name the class of a scheduler")
        with pytest.raises(SettingsError, match="got 'djnago'"):
            with start_worker(app, perform_ping_check=False):
                pass


def test_the_doctor_finds_entries_whose_last_runs_did_not_happen(app: Celery) -> None:
    app.task(no_work, name="shop.tick", base=Refusing)
    schedules = Schedules(app)
    schedules.publish()

    def receive(name: str, discarded: Any = None) -> None:
        number = schedules._known(name).number
        schedules.advance(name, number, "run", redelivered=False, discarded=discarded)

    receive("nightly", "expired")
    expired = ["the last run of nightly did not happen: it expired before a worker ran it"]
    assert schedule_problems(app) == expired
    receive("nightly", "cancelled")
    assert schedule_problems(app) == expired, "the user wanted that one not to run"
    receive("nightly")
    assert schedule_problems(app) == []
    for _ in range(2):
        receive("tick")
        schedules.send_anew("tick", "shop.tick", "run")
    why = "apply_async of its class raised RuntimeError: already queued"
    assert schedule_problems(app) == [f"the last 2 runs of tick did not happen: {why}"]
    assert [each.runs for each in schedules] == [1, 0]
