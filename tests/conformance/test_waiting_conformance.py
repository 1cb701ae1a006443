"""List, search, cancel and move waiting tasks on every broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import time
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_native_delay import (
    CannotDelay,
    Delay,
    DelayTooLong,
    InvalidDueTime,
    InvalidQuery,
    Query,
    Verdict,
    install,
)
from celery_native_delay.app.installation import installed
from celery_native_delay.bulk import bulk
from celery_native_delay.cli import delay as cli
from celery_native_delay.testing import vhost_name
from tests.conformance.brokers import Broker, RabbitMQ, without
from tests.conformance.traffic import installed_app, plain
from tests.traffic import JOBS, Inbox, inbox, send_task
from tests.waiting import wait_until

#: A store beside SQS is one beside any broker that kombu's virtual transports serve: the tests of
#: what SQS has a part in run on it, too.
BROKERS = without("valkey", "sqs")
also_on_sqs = pytest.mark.parametrize("broker", without("valkey"), indirect=True, scope="session")

#: For delays of hours.
LEVELS = 20


@pytest.fixture
def app(url: str, tmp_path: Path, new_store: Callable[[str], str]) -> Iterator[Celery]:
    with installed_app(url, tmp_path, new_store, levels=LEVELS) as app:
        yield app


@pytest.fixture
def delay(app: Celery) -> Delay:
    return Delay(app)


@pytest.fixture
def arrivals(app: Celery) -> Iterator[Inbox]:
    """A kombu consumer of the queue, which runs no task."""
    with app.connection_for_read() as connection, inbox(connection, JOBS) as arriving:
        yield arriving


def test_waiting_tasks_are_listed_by_due_time_with_all_fields(app: Celery, delay: Delay) -> None:
    before = time()
    for number in (3, 1, 2):
        send_task(app, number, countdown=number * 1000)
    with pytest.raises(InvalidQuery, match="limit to be a whole number from 0, got -1"):
        delay.ls(limit=-1)
    page = delay.ls(limit=2)
    assert [task.id for task in page] == ["order-1", "order-2"]
    assert page.total == delay.count() == 3
    assert [task.id for task in delay.ls(offset=2).tasks] == ["order-3"]
    task = page.tasks[0]
    assert (task.name, task.args, task.queue, task.retries) == ("shop.remind", "('ada',)", JOBS, 0)
    assert task.kwargs == "{'order': 1, 'text': 'käse'}"
    assert task.root_id == "order-1"
    assert before + 1000 <= task.due_us / 1e6 <= time() + 1000
    assert delay.next_due() == task.due
    assert delay.show("order-1") == [task]
    assert delay.show("order") == delay.show("order-1:") == []


def test_search_count_and_histogram(app: Celery, delay: Delay) -> None:
    for number in range(20):
        send_task(app, number, countdown=100 + number * 100)
    odd = [f"order-{number}" for number in range(1, 20, 2)]
    assert [task.id for task in delay.ls("käse name:remind").tasks] == odd
    assert delay.count("käse") == len(odd)
    assert [task.id for task in delay.ls("käse", offset=1, limit=2).tasks] == odd[1:3]
    assert [task.id for task in delay.ls("kwargs:order=7").tasks] == ["order-7"]
    assert [task.id for task in delay.ls("KÄSE Order-13").tasks] == ["order-13"]
    assert [task.id for task in delay.ls("Shop.Remind \"'order': 3\"").tasks] == ["order-3"]
    assert delay.count("remind nothing") == 0
    assert delay.count(Query(name="shop.remind", queue=JOBS)) == 20
    assert delay.count(Query(queue="other")) == 0
    now_us = round(time() * 1e6)
    soon = Query().due_within(None, now_us + 1_050_000_000)
    assert delay.count(soon) == len(delay.ls(soon).tasks) == 10
    late = Query.parse("käse").due_within(now_us + 1_050_000_000, None)
    assert [task.id for task in delay.ls(late).tasks] == odd[5:]
    bars = delay.histogram(bars=10)
    assert len(bars) <= 10
    assert sum(bar.count for bar in bars) == 20


def test_ids_are_read_in_pages(app: Celery, delay: Delay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if more tasks than a page are due at the same time."""
    monkeypatch.setattr("celery_native_delay.records.waiting.AT_ONCE", 3)
    eta = datetime.now(UTC) + timedelta(hours=1)
    for number in range(12):
        later = timedelta(seconds=max(0, number - 8))
        app.send_task("shop.remind", eta=eta + later, task_id=f"order-{number:02}", queue=JOBS)
    every = [f"order-{number:02}" for number in range(12)]
    wait_until(lambda: delay.count() == 12)
    assert delay.ids() == every
    assert delay.ids(limit=7) == every[:7]
    assert delay.ids("order-1") == every[10:]
    due_us = [task.due_us for task in delay.ls().tasks]
    assert delay.ids(Query(from_us=due_us[0], until_us=due_us[10])) == every[:10]
    assert delay.ids(Query(from_us=due_us[10])) == every[10:]
    assert delay.ids(Query(until_us=due_us[0])) == []


@also_on_sqs
def test_a_cancelled_task_is_delivered_at_once_with_the_mark_cancelled(
    app: Celery, delay: Delay, arrivals: Inbox
) -> None:
    send_task(app, 1, countdown=3600, expires=7200)
    outcome = delay.cancel("order-1")
    assert outcome.verdict is Verdict.DONE
    assert [task.id for task in outcome.tasks] == ["order-1"]
    assert app.AsyncResult("order-1").state == "REVOKED"
    assert delay.show("order-1") == []
    assert (delay.ls().tasks, delay.count()) == ((), 0)
    (arrival,) = arrivals.wait_for(1)
    assert arrival.message.native_delay.cancelled
    assert datetime.fromisoformat(arrival.message.headers["expires"]) > datetime.now(UTC)
    assert delay.cancel("order-1").verdict is Verdict.UNKNOWN
    assert delay.reschedule("order-1", countdown=1).verdict is Verdict.UNKNOWN


def test_for_a_plain_worker_a_cancelled_task_has_expired(
    app: Celery, delay: Delay, url: str
) -> None:
    send_task(app, 1, countdown=3600)
    assert delay.cancel("order-1")
    with plain(url) as connection, inbox(connection, JOBS) as arriving:
        (arrival,) = arriving.wait_for(1)
    assert datetime.fromisoformat(arrival.message.headers["expires"]) < datetime.now(UTC)


def test_a_moved_task_is_due_at_its_new_time(app: Celery, delay: Delay, arrivals: Inbox) -> None:
    """Moved later, then earlier; the header eta has the new time."""
    send_task(app, 1, countdown=3600)
    later = datetime.now(UTC) + timedelta(hours=2)
    moved = delay.reschedule("order-1", eta=later)
    assert moved
    (task,) = delay.show("order-1")
    assert task.due == later
    assert task.kwargs == "{'order': 1, 'text': 'käse'}"
    before = time()
    assert delay.reschedule("order-1", countdown=1.5)
    (task,) = delay.show("order-1")
    (arrival,) = arrivals.wait_for(1)
    assert arrival.at >= before + 1.5 - 0.001
    assert datetime.fromisoformat(arrival.message.headers["eta"]) == task.due
    assert arrival.message.headers["id"] == "order-1"
    assert arrival.body[1] == {"order": 1, "text": "käse"}


@also_on_sqs
def test_run_now_delivers_a_task_at_once(app: Celery, delay: Delay, arrivals: Inbox) -> None:
    send_task(app, 1, countdown=3600)
    assert delay.run_now("order-1")
    (arrival,) = arrivals.wait_for(1)
    assert not arrival.message.native_delay.cancelled
    assert datetime.fromisoformat(arrival.message.headers["eta"]) <= datetime.now(UTC)


def test_many_tasks_are_moved_by_a_time_or_spread(app: Celery, delay: Delay) -> None:
    """``by`` keeps the spacing of the tasks; ``spread`` sets it."""
    for number in range(3):
        send_task(app, number, countdown=3600 + number * 60)
    before = list(delay.ls())
    assert all(delay.reschedule_all(before, by=7200))
    after = [task.due_us for task in delay.ls()]
    assert after == [task.due_us + 7_200_000_000 for task in before]
    assert delay.reschedule(before[0], by=-600.5)
    assert delay.ls()[0].due_us == after[0] - 600_500_000
    eta = datetime.now(UTC) + timedelta(hours=1)
    assert all(delay.reschedule_all(delay.ls(), eta=eta, spread=600))
    assert [task.due - eta for task in delay.ls()] == [
        timedelta(minutes=each) for each in (0, 5, 10)
    ]
    with pytest.raises(InvalidDueTime, match="by alone"):
        delay.reschedule_all(before, by=1, spread=1)
    with pytest.raises(DelayTooLong):
        delay.reschedule(before[0], by=1e12)


def test_a_waiting_task_is_updated(app: Celery, delay: Delay) -> None:
    """It is listed as changed, and arrives so in its new queue; all else stays."""
    send_task(app, 1, countdown=3600)
    (before,) = delay.show("order-1")
    for wrong in ({"args": "7"}, {"priority": 300}, {"kwargs": {"order": object()}}):
        with pytest.raises(CannotDelay):
            delay.update("order-1", **wrong)  # type: ignore[arg-type]
    with pytest.raises(CannotDelay, match="never run"):
        delay.update("order-1", expires=60)
    assert delay.show("order-1") == [before]
    expires = datetime.now(UTC) + timedelta(hours=2)
    changed = delay.update(
        "order-1", kwargs={"order": 7}, priority=5, queue="elsewhere", expires=expires
    )
    assert changed
    (task,) = delay.show("order-1")
    assert (task.kwargs, task.queue, task.due_us) == ("{'order': 7}", "elsewhere", before.due_us)
    assert delay.run_now("order-1")
    with app.connection_for_read() as connection, inbox(connection, "elsewhere") as arriving:
        (arrival,) = arriving.wait_for(1)
    assert (arrival.body[0], arrival.body[1]) == (["ada"], {"order": 7})
    assert arrival.message.properties["priority"] == 5
    assert arrival.message.headers["expires"] == expires.isoformat()
    assert arrival.message.headers["id"] == "order-1"
    assert delay.update("order-1", priority=1).verdict is Verdict.UNKNOWN


def test_a_schedule_entry_is_added_and_removed_at_run_time(app: Celery, delay: Delay) -> None:
    app.conf.native_delay_schedules = True
    schedules = delay.schedules()
    schedules.add("report", "shop.report", "every 1 h", [7], options={"queue": JOBS})
    schedules.change("report", schedule="every 2 h")
    (entry,) = schedules
    assert (entry.schedule, entry.is_added) == ("every 2 h", True)
    assert [(task.args, task.due) for task in delay.ls()] == [("[7]", entry.next_due)]
    schedules.remove("report")
    assert (list(schedules), delay.count()) == ([], 0)


def test_a_refused_change_leaves_the_task_unchanged(app: Celery, delay: Delay) -> None:
    send_task(app, 1, countdown=3600)
    (task,) = delay.show("order-1")
    with pytest.raises(DelayTooLong):
        delay.reschedule("order-1", countdown=1e12)
    with pytest.raises(DelayTooLong):
        delay.reschedule("order-1", eta="9000-01-01")
    with pytest.raises(InvalidDueTime, match="seconds, got '5'"):
        delay.reschedule("order-1", countdown="5")  # type: ignore[arg-type]
    with pytest.raises(InvalidDueTime, match="countdown or eta"):
        delay.reschedule("order-1")
    assert delay.show("order-1") == [task]
    assert delay.cancel("order-2").verdict is Verdict.UNKNOWN


def test_tasks_are_cancelled_while_the_result_backend_is_unreachable(
    app: Celery, delay: Delay, caplog: pytest.LogCaptureFixture
) -> None:
    """The backend is tried once for all tasks."""
    ids = [send_task(app, number, countdown=3600) for number in range(3)]
    results = app.backend
    app.conf.result_backend = "file:///no/such/folder"
    app._local.backend = app._backend_cache = None
    assert all(delay.cancel_all(ids))
    assert sum("its result is not REVOKED yet" in each.message for each in caplog.records) == 1
    app._local.backend = results


def test_cancel_covers_all_messages_of_an_id(app: Celery, delay: Delay) -> None:
    """A task, and its retry that waits beside it."""
    send_task(app, 1, countdown=3600)
    send_task(app, 1, countdown=7200, retries=1)
    assert len(delay.show("order-1")) == 2
    outcome = delay.cancel("order-1")
    assert outcome
    assert len(outcome.tasks) == 2
    assert delay.show("order-1") == []


def test_celerys_revoke_cancels_waiting_tasks(app: Celery, delay: Delay) -> None:
    """Celery's broadcast to the workers follows."""
    if app.conf.broker_url.startswith("pgmq://"):
        pytest.skip("kombu 5.7 broadcasts on pgmq by a function that pgmq lacks")
    for number in range(4):
        send_task(app, number, countdown=3600)
    app.control.revoke("order-0")
    app.control.revoke(["order-1", "unknown"])
    app.AsyncResult("order-2").revoke()
    assert [task.id for task in delay.ls().tasks] == ["order-3"]
    assert [app.AsyncResult(f"order-{number}").state for number in range(4)] == [
        "REVOKED",
        "REVOKED",
        "REVOKED",
        "PENDING",
    ]


def draining_like(app: Celery, url: str, **settings: Any) -> Celery:
    """The same app in its next release, which drains."""
    draining = Celery("shop", broker=url, set_as_current=False)
    draining.conf.update(app.conf.changes)
    return install(draining, **installed(app).keywords | {"enabled": "drain"} | settings)


@also_on_sqs
def test_a_draining_app_lists_and_cancels_waiting_tasks_and_delays_nothing_new(
    app: Celery, arrivals: Inbox, url: str
) -> None:
    """As with plain Celery, a new task goes to its queue at once, where a worker holds it."""
    for number in (1, 2):
        send_task(app, number, countdown=3000)
    with draining_like(app, url) as draining:
        delay = Delay(draining)
        assert delay.ids() == ["order-1", "order-2"]
        assert delay.cancel("order-1")
        assert delay.reschedule("order-2", countdown=6000)
        send_task(draining, 3, countdown=3000)
        with bulk(draining) as batch:
            batch.send("shop.remind", (4,), queue=JOBS, countdown=3000)
        delay.debounce(draining.signature("shop.remind", queue=JOBS), key="4", seconds=3000)

        def new_ones() -> list[Any]:
            return [each for each in arrivals.arrivals if not each.waited]

        assert arrivals.receive_until(lambda: len(new_ones()) == 3)
        assert all(each.message.headers["eta"] for each in new_ones())
        assert delay.ids() == ["order-2"]


@also_on_sqs
def test_uninstall_removes_everything_after_it_moved_what_waits(
    app: Celery, delay: Delay, broker: Broker, url: str
) -> None:
    """The waiting tasks become plain ETA tasks in their queues."""
    send_task(app, 1, countdown=3000)
    delay.debounce(app.signature("shop.remind", queue=JOBS), key="4", seconds=3000)
    send_task(app, 2, countdown=2000)
    assert delay.cancel("order-2")
    assert "got True" in uninstalled(app, status=1)
    settings = {}
    if isinstance(broker, RabbitMQ):
        settings["management_url"] = broker.server.management_url
    with draining_like(app, url, **settings) as draining:
        assert "2 task(s) wait" in uninstalled(draining, status=1)
        assert delay.count() == 2
        if url.startswith(("sqs:", "pgmq:")):
            assert "2 task(s) moved to their queues" in uninstalled(draining, "--move-to-eta")
            return
        if isinstance(broker, RabbitMQ):
            with draining_like(app, url, management_url="http://127.0.0.1:9") as alone:
                told = uninstalled(alone, "--move-to-eta", status=1)
            assert "delete the queues and exchanges tests.v1.* by hand" in told
            assert delay.count() == 0
        else:
            assert "2 task(s) moved to their queues" in uninstalled(draining, "--move-to-eta")
        assert "removed " in uninstalled(draining)
        assert "removed 0 " in uninstalled(draining)
    with plain(url) as connection, inbox(connection, JOBS) as arriving:

        def moved() -> list[Any]:
            """The headers of tasks, without the one that says that its task was cancelled."""
            headers = [each.message.headers for each in arriving.arrivals]
            return [each for each in headers if each["id"] != "order-2"]

        assert arriving.receive_until(lambda: len(moved()) == 2)
        for headers in moved():
            eta = datetime.fromisoformat(headers["eta"])
            assert 0 < (eta - datetime.now(UTC)).total_seconds() <= 3000
            assert "native_delay" not in str(headers)
    if isinstance(broker, RabbitMQ):
        vhost = vhost_name(url)
        names = [each["name"] for each in broker.server.queues(vhost)]
        names += [each["name"] for each in broker.server.api("GET", f"/exchanges/{vhost}")]
        assert not [name for name in names if name.startswith("tests.")]


def uninstalled(app: Celery, *options: str, status: int = 0) -> str:
    """What ``delay uninstall`` prints."""
    context = CLIContext(app=app, no_color=True, workdir=None)
    done = CliRunner().invoke(cli, ["uninstall", "--yes", *options], obj=context)
    assert isinstance(done.exception, SystemExit | None), done.exception
    assert done.exit_code == status, done.output
    return done.output
