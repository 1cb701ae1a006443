"""The page Delays in Flower and its REST API, on real brokers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from celery import Celery
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Keys

from celery_native_delay import Delay
from celery_native_delay.bulk import bulk
from celery_native_delay.testing import PrivateRedis
from tests.acceptance.flower import DelaysPage, Flowers, browser
from tests.acceptance.worker import Fleet, fleet_on
from tests.brokers import on_one_version
from tests.waiting import wait_until

USER = "admin:secret"

TASKS = 1000

#: Of them, every so manieth.
ADA, CAREFUL = 7, 4


@pytest.fixture
def fleet(store_redis: PrivateRedis, tmp_path: Path) -> Iterator[Fleet]:
    with fleet_on(store_redis.url, tmp_path) as fleet:
        yield fleet


@pytest.fixture
def flowers(fleet: Fleet) -> Flowers:
    return Flowers(fleet)


def send(app: Celery, count: int = TASKS) -> list[str]:
    """Send delayed tasks that become due between 1 and 11 hours from now; returns their ids."""
    begin, step = datetime.now(UTC) + timedelta(hours=1), timedelta(hours=10) / count
    with bulk(app) as batch:
        return [
            batch.send(
                "note" if number % CAREFUL else "careful",
                (f"order-{number}", "bob" if number % ADA else "ada"),
                task_id=f"task-{number}",
                eta=begin + number * step,
            )
            for number in range(count)
        ]


@pytest.mark.ci
def test_the_page_finds_filters_and_changes_waiting_tasks(
    fleet: Fleet, flowers: Flowers, store_redis: PrivateRedis
) -> None:
    """With a password and under a URL prefix; a cancelled task is gone from the broker."""
    app = fleet.app()
    ids = send(app)
    delay = Delay(app)
    worker = fleet.worker(pool="solo", wait=False, more=("-E",))
    flower = flowers.start(user=USER, prefix="ops/flower")
    with browser() as chrome:
        page = DelaysPage(chrome, flower)
        page.lists(TASKS)
        page.wait(lambda: page.text("#delays-waiting") == "1,000")
        assert page.text("#delays-overdue") == page.text("#delays-parked") == "0"
        assert "order-0" in page.text("#delays-table tbody tr:first-child")

        page.search("order-99")
        page.lists(11)
        page.search(f"name:careful args:ada queue:{app.conf.task_default_queue}")
        page.lists(sum(n % CAREFUL == n % ADA == 0 for n in range(TASKS)))
        page.search("ORDER-3 args:ada")
        page.lists(sum(str(n)[:1] == "3" for n in range(0, TASKS, ADA)))

        careful = TASKS // CAREFUL
        page.search("name:careful")
        page.lists(careful)
        page.click("#delays-page-box")
        page.click("#delays-all")
        page.wait(lambda: page.text("#delays-selected") == f"{careful} tasks selected")
        page.click("[data-change=cancel]")
        assert page.question() == f"Cancel {careful} tasks?"
        page.wait(lambda: page.focus("id") == "delays-no")
        chrome.switch_to.active_element.send_keys(Keys.ENTER)
        page.wait(lambda: not page.dialog_is_open())
        page.wait(lambda: page.focus("data-change") == "cancel")
        assert delay.count() == TASKS
        page.click("[data-change=cancel]")
        assert page.question() == f"Cancel {careful} tasks?"
        page.confirm()
        page.told(f"{careful} tasks cancelled")
        page.search("")
        page.lists(TASKS - careful)
        assert set(delay.ids()) == {each for n, each in enumerate(ids) if n % CAREFUL}

        def find(order: str) -> None:
            page.search(f"{order} bob")
            page.wait(lambda: f"{order}'" in page.text("#delays-table tbody tr:first-child"))

        find("order-5")
        page.choose("tbody tr:first-child", "[data-one=reschedule]")
        assert page.question() == "Reschedule 1 task?"
        page.find("#delays-at").send_keys("25 h")
        page.confirm()
        page.wait(lambda: delay.show("task-5")[0].due > datetime.now(UTC) + timedelta(hours=20))
        find("order-6")
        page.js(
            "arguments[0].focus(); arguments[0].dataset.old = 'yes';"
            "$('#delays-table').DataTable().ajax.reload(null, false)",
            page.find("tbody tr:first-child .delays-box"),
        )
        page.wait(lambda: not page.found("[data-old]"))
        assert page.focus("class") == "form-check-input delays-box", "lost while it was drawn again"

        def is_selected() -> bool:
            if page.text("#delays-selected") != "1 task selected":
                with suppress(WebDriverException):  # it is being drawn again
                    chrome.switch_to.active_element.send_keys(Keys.SPACE)
            return page.text("#delays-selected") == "1 task selected"

        page.wait(is_selected)
        page.find("[data-change=run-now]").send_keys(Keys.ENTER)
        assert page.question() == "Run 1 task now?"
        page.confirm()
        worker.wait_ready()

        def park(task_id: str) -> None:
            app.send_task("note", queue="elsewhere", countdown=3600, task_id=task_id)
            store_redis.client.set("elsewhere", "no queue")
            assert delay.run_now(task_id)
            page.wait(lambda: page.text("#delays-parked") == "1")
            page.click("#delays-show-parked")

        park("stray")
        page.wait(lambda: "note stray" in page.text("#delays-parked-list"))
        assert "elsewhere" in page.text("#delays-parked-list")
        store_redis.client.delete("elsewhere")
        page.click("#delays-requeue")
        page.told("1 parked message(s) delivered")
        page.wait(lambda: not page.dialog_is_open("#delays-parked-dialog"))
        page.wait(lambda: page.text("#delays-parked") == "0")
        assert store_redis.client.llen("elsewhere") == 1
        park("lost")
        page.click("#delays-purge")
        page.wait(lambda: "Delete 1 task?" in page.text("#delays-purge-question"))
        page.wait(lambda: page.focus("id") == "delays-purge-no")
        chrome.switch_to.active_element.send_keys(Keys.ENTER)
        page.click("#delays-purge")
        page.click("#delays-purge-yes")
        page.told("1 task deleted")
        page.wait(lambda: page.text("#delays-parked") == "0")
        assert fleet.record.wait_for(task_id="task-6")[0].id == "task-6"

        loaded = page.js("return performance.getEntriesByType('resource').map(each => each.name)")
        assert {name for name in loaded if not name.startswith(flower.page(""))} == set()
        assert page.complaints() == []
    assert {run.id for run in fleet.record.runs()} == {"task-6"}


def test_without_a_password_and_read_only_nothing_can_be_changed(flowers: Flowers) -> None:
    """As on Flower's own pages: the page has no buttons and says why, and the API refuses."""
    (task_id, *_) = send(flowers.fleet.app(), 20)
    open_to_all = {"FLOWER_UNAUTHENTICATED_API": "true"}
    nobody = flowers.start(wait=False)
    reader = flowers.start("--read-only", wait=False, **open_to_all)
    everybody = flowers.start(wait=False, **open_to_all)
    admin = flowers.start(user=USER, wait=False)
    many, later = "/api/delays/cancel", "/api/delays/reschedule"
    requeue, purge = "/api/delays/parked/requeue", "/api/delays/parked/purge"
    body = {"ids": [task_id]}
    changes = {many: body, later: body, requeue: {}, purge: {}}

    for flower in (nobody.ready(), reader.ready()):
        assert flower.json("/delays/summary")["waiting"] == 20
        html = flower.ask("/delays")[1]
        assert "delays-closed" in html
        assert "data-change=" not in html
        assert 'id="delays-purge"' not in html
    assert 'href="/delays"' in nobody.ask("/broker")[1]
    assert nobody.ask("/api/delays")[0] == 401
    assert reader.json("/api/delays?limit=3&search=order-1")["total"] == 11
    for path in ("/delays", "/delays/summary", "/delays/ids", "/api/delays", "/delays/datatable"):
        assert admin.ask(path, user="admin:wrong")[0] == 401
    for path, sent in changes.items():
        assert nobody.ask(path, sent)[0] == 401
        status, text = reader.ask(path, sent)
        assert (status, "Read only" in text) == (403, True)
        assert admin.ask(path, sent, user="admin:wrong")[0] == 401
        assert admin.ask(path, sent, Sec_Fetch_Site="cross-site")[0] == 403
    assert admin.ask("/delays")[0] == 200

    def moved(number: int, when: str) -> float:
        done = everybody.json(later, {"ids": [f"task-{number}"], "when": when})["outcomes"]
        assert done[0]["verdict"] == "done"
        return done[0]["due_us"] / 1e6

    (found,) = everybody.json(f"/api/delays?search=id:{task_id}")["tasks"]
    assert found["name"] == "careful"
    assert moved(1, "1d") > (datetime.now(UTC) + timedelta(hours=20)).timestamp()
    moved(2, "2030-01-01T00:00Z")
    assert moved(2, "+2 h") == datetime(2030, 1, 1, 2, tzinfo=UTC).timestamp()
    for path, sent, expected, says in (
        (later, {"ids": ["task-1"], "when": "soon"}, 400, "tomorrow 09:00"),
        (later, {"ids": ["task-1"]}, 400, "expected when"),
        (later, {"ids": ["task-1"], "when": "9999-01-01"}, 400, "longest delay"),
        (many, {"ids": "task-1"}, 400, "list of ids"),
        (purge, {"parked": 3}, 409, "expected 3 parked message(s), found 0"),
        (purge, {"parked": "3"}, 400, "a number of messages"),
        ("/api/delays?search=name:", None, 400, "behind the colon"),
        ("/api/delays?limit=0", None, 400, "limit"),
    ):
        status, text = everybody.ask(path, sent)
        assert (status, says in text) == (expected, True), (path, status, text)
    by_curl = {"Content_Type": "application/x-www-form-urlencoded"}
    assert everybody.ask(purge, {"parked": 3}, **by_curl)[0] == 409
    assert everybody.json("/delays/parked") == {"total": 0, "tasks": []}
    assert everybody.json(purge, {"parked": 0}) == {"purged": 0}
    assert everybody.json(requeue, {})["still_parked"] == 0
    done = everybody.json(many, {"ids": [task_id, "task-1", "unknown"]})
    assert [each["verdict"] for each in done["outcomes"]] == ["done", "done", "unknown"]
    by_proxy = {"Authorization": "Bearer e30.not-base64"}
    assert everybody.json("/api/delays/hold", {"task": "shop.*"}, **by_proxy)["by"] == "Flower"


@pytest.mark.ci
def test_the_page_holds_tasks_and_releases_them(fleet: Fleet, flowers: Flowers) -> None:
    flower = flowers.start(user=USER, wait=False)
    fleet.worker()
    app = fleet.app()
    send(app, 3)
    flower.ready()
    with browser() as chrome:
        page = DelaysPage(chrome, flower)
        page.lists(3)
        page.click("#delays-hold")
        page.wait(lambda: page.dialog_is_open("#delays-hold-dialog"))
        page.find("#delays-hold-task").send_keys("no*")
        page.click("#delays-hold-yes")
        page.told("no*: workers follow within 5 s")
        page.wait(lambda: "no* is held by admin since" in page.text("#delays-holds"))
        wait_until(lambda: app.send_task("note") and Delay(app).holds()[0].held > 0)
        page.wait(lambda: re.search(r"[0-9]+ tasks? waits?", page.text("#delays-holds")))
        page.wait(lambda: "held" in page.text("#delays-table tbody"))
        assert "year" not in page.text("#delays-next")
        page.click("#delays-holds button")
        page.wait(lambda: page.dialog_is_open("#delays-hold-dialog"))
        page.find("#delays-hold-rate").send_keys("1/x", Keys.ENTER)
        page.wait(lambda: "expected a rate" in page.text("#delays-hold-error"))
        page.find("#delays-hold-rate").clear()
        page.click("#delays-hold-yes")
        page.told("released")
        page.wait(lambda: not page.find("#delays-holds").is_displayed())
        assert [each for each in page.complaints() if "400" not in each] == []
    wait_until(lambda: Delay(app).count() == 3)
    assert Delay(app).holds() == []


@pytest.mark.ci
def test_stock_flower_has_the_page_by_one_line(fleet: Fleet, flowers: Flowers) -> None:
    """In `celery flower`, its Revoke button cancels waiting tasks and its metrics include ours."""
    app = fleet.app()
    ids = send(app, 20)
    config = fleet.folder / "flowerconfig.py"
    config.write_text("from celery_native_delay.flower import install; install()\n")
    flower = flowers.start(f"--conf={config}", command=("flower",), user=USER)
    assert flower.json("/api/delays")["total"] == len(ids)
    fleet.worker(pool="solo", more=("-E",))
    flower.json("/api/task/revoke/task-3", {})
    flower.json("/api/delays/cancel", {"ids": ["task-4"]})
    flower.json("/api/delays/run-now", {"ids": ["task-5"]})
    fleet.record.wait_for(task_id="task-5")

    def in_state(state: str) -> set[str]:
        return set(flower.json(f"/api/tasks?limit=1000&state={state}"))

    wait_until(lambda: in_state("REVOKED") == {"task-3", "task-4"})
    wait_until(lambda: in_state("SUCCESS") == {"task-5"})
    assert flower.json("/api/delays")["total"] == len(ids) - 3

    def metrics_tell() -> bool:
        metrics = flower.ask("/metrics")[1]
        matured = 'celery_delay_matured_total{queue_name="default"} 1.0'
        return f"celery_delay_pending {len(ids) - 3}.0" in metrics and matured in metrics

    wait_until(metrics_tell)


@on_one_version
def test_on_rabbitmq_with_a_store_the_page_lists_tasks(
    vhost_url: str, store_redis: PrivateRedis, tmp_path: Path
) -> None:
    """Without a store the page counts what waits in the levels, and says how to list it."""
    store = {"native_delay_store": store_redis.url}
    with fleet_on(vhost_url, tmp_path, **store) as fleet:
        flowers = Flowers(fleet)
        send(fleet.app(native_delay_store=None), 3)
        flower = flowers.start(user=USER, wait=False)
        blind = flowers.start(wait=False, user=USER, conf={"native_delay_store": None})
        app = fleet.app()
        send(app, 40)
        flower.ready()
        flower.json("/api/delays/cancel", {"ids": ["task-7", "task-8"]})
        assert Delay(app).count() == 38
        assert blind.json("/delays/summary")["waiting"] == 3
        assert "native_delay_store" in blind.json("/delays/summary")["error"]
        assert blind.ask("/api/delays")[0] == 503
        with browser() as chrome:
            page = DelaysPage(chrome, flower)
            page.lists(38)
            wait_until(lambda: re.match(r"5\d min", page.text("#delays-next")))
            page = DelaysPage(chrome, blind)
            page.wait(lambda: page.text("#delays-levels li"))
            assert page.find("#delays-levels li").is_displayed()
            assert page.text("#delays-levels-next") == "within 1 h 8 min"  # 2**15 x 125 ms
            assert "is-stuck" not in page.find("#delays-levels").get_attribute("innerHTML")
