"""The pages Rates, Schedules and Runs in Flower, and their REST API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from celery import Celery
from selenium.webdriver import Chrome, Keys

from celery_native_delay import Delay, Run
from celery_native_delay.app.schedules import Scheduled, Schedules
from celery_native_delay.testing import PrivateRedis
from tests.acceptance.flower import (
    DelaysPage,
    FlowerProcess,
    Flowers,
    RatesPage,
    RunsPage,
    SchedulesPage,
)
from tests.acceptance.test_flower_page import HOSTILE, SHOWN, phone, raw_in
from tests.acceptance.test_runs import send
from tests.acceptance.worker import Fleet, fleet_on
from tests.brokers import on_one_version
from tests.hanging import hung
from tests.lines import fill
from tests.waiting import wait_until

HTML, HTML_SHOWN = f'<b title="x">{HOSTILE}</b>', f'<b title="x">{SHOWN}</b>'

#: The rate is so low that no waiting task starts during the tests.
RATES = {"shop.call_api": "100/d", "shop.send_mail": "10/d"}
TENANTS = 20

#: Names that a URL, HTML or a path would change.
STRANGE = ["..", "a/b?c=d#e&f%2Fg é\n+", HTML]

#: No worker runs, so the entry "late" is due after a second and stays so.
ENTRIES = {
    "late": {"task": "note", "schedule": 1.0},
    **{f"hourly-{n:02}": {"task": "note", "schedule": 3600.0 + n} for n in range(10)},
    **{name: {"task": "shop.report", "schedule": 86_400.0} for name in STRANGE},
}

RUNS = ("nightly-1", "nightly-2", HTML)
RUN_ROW = "tbody tr[id='run-nightly-1']"

CONF: dict[str, Any] = {
    "native_delay_rates": RATES,
    "native_delay_schedules": True,
    "beat_schedule": ENTRIES,
}

#: The pages, each with the number of rows of its table.
PAGES = pytest.mark.parametrize(
    ("page_class", "count"),
    [(RatesPage, TENANTS + 2), (SchedulesPage, len(ENTRIES)), (RunsPage, len(RUNS))],
)


@pytest.fixture(scope="module")
def fleet(redis: PrivateRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_on(redis.url, tmp_path_factory.mktemp("fleet"), **CONF) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def app(fleet: Fleet) -> Celery:
    """1 to 20 tasks wait for each tenant, some for all mail, whose rate is paused."""
    app = fleet.app()
    for number in range(TENANTS):
        fill(app, "shop.call_api", f"tenant-{number}", "100/d", waiting=TENANTS - number)
    fill(app, "shop.call_api", HTML, "100/d", waiting=30)
    fill(app, "shop.send_mail", None, "10/d", waiting=99, held_seconds=90_000)
    Delay(app).set_rate("shop.call_api", "tenant-3", "200/d")
    Schedules(app).publish()
    for number, run_id in enumerate(RUNS):
        send(app, run_id, 5 + number, countdown=3600)
    return app


@pytest.fixture(scope="module")
def flower(app: Celery, fleet: Fleet) -> FlowerProcess:
    """With a password and under a URL prefix."""
    return Flowers(fleet).start(user="admin:secret", prefix="ops/flower")


def entry_of(app: Celery, name: str) -> Scheduled:
    return {each.name: each for each in Delay(app).schedules()}[name]


# ---- what each page does -------------------------------------------------------------------


def test_the_page_lists_finds_and_sorts_the_queues_of_rates(
    app: Celery, flower: FlowerProcess, chrome: Chrome
) -> None:
    DelaysPage(chrome, flower).click("a.nav-link[href$='/delays/rates']")
    page = RatesPage(chrome, flower, None)
    page.lists(TENANTS + 2)
    assert page.text("#rates-waiting") == str(sum(range(1, TENANTS + 1)) + 130)
    assert page.text("#rates-lines") == str(TENANTS + 2)
    assert page.text("#rates-held") == "1"
    mail, hostile, *tenants = page.rows()
    assert len(tenants) == 13
    *mail, slot, used = mail
    assert mail == ["shop.send_mail", "\u2014", "10/d", "100"]
    assert re.fullmatch(r"in 1 d \d+ min held until 20\d\d-\d\d-\d\d [\d:]+ CES?T", slot)
    assert used == "10 %1 start"
    assert hostile[1] == HTML_SHOWN
    assert tenants[0][:4] == ["shop.call_api", "tenant-0", "100/d", "20"]
    assert [row[3] for row in tenants] == [str(n) for n in range(20, 7, -1)]
    assert tenants[3][1:3] == ["tenant-3", "200/d overridden"]

    page.search("tenant-1")
    page.lists(11)
    page.click("#rates-table th:nth-child(4)")
    page.wait(lambda: page.rows()[0][1] == "tenant-19")
    page.js(
        "var link = document.querySelector('#rates-table tbody tr:first-child a');"
        "link.focus(); link.dataset.old = 'yes'"
    )
    page.wait(lambda: not page.found("[data-old]"))
    assert page.rows()[0][1] == "tenant-19", "it was drawn again, in another order"
    assert (page.focus("href") or "").endswith("/delays?search=name%3Ashop.call_api")
    assert page.complaints() == []


def test_an_entry_is_paused_resumed_and_run_with_the_keyboard(
    app: Celery, redis: PrivateRedis, flower: FlowerProcess, chrome: Chrome
) -> None:
    DelaysPage(chrome, flower).click("a.nav-link[href$='/delays/schedules']")
    page = SchedulesPage(chrome, flower, None)
    page.lists(len(ENTRIES))
    name, task, schedule, last, due, runs, late, _ = page.row("hourly-00")
    assert [name, task, schedule, last] == ["hourly-00", "note", "every 1 h", "\u2014"]
    assert due.startswith("in ")
    assert [runs, late] == ["0", "\u2014"]
    page.wait(lambda: page.row("late")[6].endswith(" s"))
    for name in ("hourly-03", ".."):
        page.press(name, "pause")
        wait_until(lambda name=name: entry_of(app, name).is_paused)
        page.told(f"{name} is paused")
        page.wait(lambda name=name: page.row(name)[4] == "paused")
        page.wait(lambda name=name: page.focus("aria-label") == f"Resume {name}")
        assert page.text("#schedules-paused") == "1"
        page.press(name, "resume", Keys.SPACE)
        wait_until(lambda name=name: not entry_of(app, name).is_paused)
        page.told(f"{name} runs at its times again")

    due = entry_of(app, "hourly-04").next_due
    waiting = redis.client.llen("default")
    page.press("hourly-04", "run-now")
    assert page.question() == "Run hourly-04 now?"
    page.wait(lambda: page.focus("id") == "schedules-no")
    page.click("#schedules-no")
    page.wait(lambda: not page.dialog_is_open())
    page.wait(lambda: page.focus("aria-label") == "Run hourly-04 now")
    assert redis.client.llen("default") == waiting
    page.press("hourly-04", "run-now")
    page.question()
    page.confirm()
    page.told("hourly-04 runs once more")
    wait_until(lambda: redis.client.llen("default") == waiting + 1)
    assert entry_of(app, "hourly-04").next_due == due
    assert page.complaints() == []


def test_an_entry_is_added_changed_and_removed(
    app: Celery, flower: FlowerProcess, chrome: Chrome
) -> None:
    """A wrong field is explained in the dialog; entries of the code have no such buttons."""
    page = SchedulesPage(chrome, flower)
    page.lists(len(ENTRIES))
    assert not page.found("[data-change=remove]")

    def enter(**fields: str) -> None:
        page.wait(lambda: page.dialog_is_open("#schedules-edit"))
        for field, text in fields.items():
            page.js(f"$('#schedules-edit-{field}').val(arguments[0])", text)
        page.click("#schedules-edit-yes")

    page.click("#schedules-add")
    enter(name="aaa", task="note", schedule="now and then", args="[7]")
    page.wait(lambda: "'every 10 s'" in page.text("#schedules-edit-error"))
    enter(schedule="every 2 h")
    page.told("aaa is added")
    page.wait(lambda: page.row("aaa")[2:3] == ["every 2 h added here"])
    page.press("aaa", "change")
    enter(schedule="every 3 h")
    page.told("aaa is changed")
    page.wait(lambda: page.row("aaa")[2].startswith("every 3 h"))
    assert [task.args for task in Delay(app).ls("args:7")] == ["[7]"]
    page.press("aaa", "remove")
    assert page.question() == "Remove aaa?"
    page.click("#schedules-yes")
    page.told("aaa is removed")
    page.lists(len(ENTRIES))
    for body, said in (
        ({"name": "x", "schedule": "every 1 s"}, "expected task to be a text"),
        ({"name": "x", "task": "x", "schedule": "every 1 s", "args": "7"}, "JSON list"),
        ({"name": "late", "task": "x", "schedule": "every 1 s"}, "code has this entry"),
    ):
        status, text = flower.ask("/api/delays/schedules/add", body)
        assert (status, said in text) == (400, True), text
    assert all("400 (Bad Request)" in each for each in page.complaints()), "the refused schedule"


def test_the_rest_api_knows_entries_of_any_name(app: Celery, flower: FlowerProcess) -> None:
    entries = flower.json("/delays/schedules/entries")["entries"]
    assert sorted(entry["name"] for entry in entries) == sorted(ENTRIES)
    for name in STRANGE:
        body = {"name": name}
        assert flower.json("/api/delays/schedules/pause", body) == body | {"task_id": None}
        assert entry_of(app, name).is_paused
        assert flower.json("/api/delays/schedules/resume", body)["name"] == name
        assert not entry_of(app, name).is_paused
        assert flower.json("/api/delays/schedules/run-now", body)["task_id"]
    status, said = flower.ask("/api/delays/schedules/pause", {"name": "other"})
    assert status == 404
    assert "expected the name of a schedule entry, got 'other'" in said
    assert flower.ask("/api/delays/schedules/pause", {})[0] == 400
    wrong = {"user": "admin:wrong"}
    assert flower.ask("/api/delays/schedules/pause", {"name": "late"}, **wrong)[0] == 401
    for path in ("/delays/schedules/entries", "/delays/runs/list", "/delays/rates/lines"):
        assert flower.ask(path, **wrong)[0] == 401


def test_the_page_counts_moves_and_cancels_runs(
    app: Celery, flower: FlowerProcess, chrome: Chrome
) -> None:
    delays, link = DelaysPage(chrome, flower), "a.nav-link[href$='/delays/runs']"
    wait_until(lambda: delays.found(link) or delays.open())  # Flower has seen a run by then
    delays.click(link)
    page = RunsPage(chrome, flower, None)
    page.lists(len(RUNS))
    page.wait(lambda: page.row(RUN_ROW)[:2] == ["nightly-1", "note"])
    page.wait(lambda: page.row(RUN_ROW)[3:9] == ["6", "5", "1", "5", "0", ""])
    links = page.found("#runs-table td a[href*='search=run']")
    hrefs = {link.text: str(link.get_attribute("href")) for link in links}
    (search,) = parse_qs(urlsplit(hrefs[HTML_SHOWN]).query)["search"]
    assert Delay(app).count(search) == 7

    before = Delay(app).ls('run:"nightly-1"')[0].due
    page.click(f"{RUN_ROW} [data-change=reschedule]")
    page.wait(lambda: page.dialog_is_open() and page.focus("id") == "runs-by")
    page.find("#runs-by").send_keys("soon")
    page.click("#runs-yes")
    page.wait(lambda: "expected a duration" in page.text("#runs-wrong"))
    page.find("#runs-by").clear()
    page.find("#runs-by").send_keys("1 h")
    page.click("#runs-yes")
    page.told("5 task(s) moved")
    page.wait(lambda: page.row(RUN_ROW)[8] == "moved by 1 h")
    assert round((Delay(app).ls('run:"nightly-1"')[0].due - before).total_seconds()) == 3600

    page.click(f"{RUN_ROW} [data-change=cancel]")
    page.wait(page.dialog_is_open)
    assert page.text("#runs-question") == "Cancel run nightly-1?"
    page.click("#runs-yes")
    page.wait(lambda: page.row(RUN_ROW)[8] == "cancelled")
    assert [Run(each, app=app).status().cancelled for each in RUNS] == [True, False, False]
    assert all("400 (Bad Request)" in each for each in page.complaints()), "the refused duration"


def test_the_api_changes_runs_and_says_what_it_expects(app: Celery, flower: FlowerProcess) -> None:
    for verb, body, said in (
        ("cancel", {"run": "unknown"}, "expected the name of a run that was sent"),
        ("cancel", {}, "expected the name of a run"),
        ("reschedule", {"run": "nightly-2"}, "to reschedule it by"),
    ):
        status, text = flower.ask(f"/api/delays/runs/{verb}", body)
        assert (status, said in text) == (400, True), text
    moved = flower.json("/api/delays/runs/reschedule", {"run": "nightly-2", "by": "30m"})
    assert moved == {"run": "nightly-2", "message": "6 task(s) moved"}
    assert Run("nightly-2", app=app).status().moved_seconds == 1800


# ---- what all of them do -------------------------------------------------------------------


@pytest.mark.ci
@PAGES
def test_a_phone_shows_all_columns_and_no_page_obeys_a_hostile_name(
    flower: FlowerProcess, chrome: Chrome, page_class: type[DelaysPage], count: int
) -> None:
    table = page_class.name
    with phone(chrome):
        page = page_class(chrome, flower)
        page.lists(count)
        # In one go: the table is drawn again every few seconds.
        boxes, edge, wide = page.js(
            """
            const list = document.getElementById(arguments[0]);
            const parts = [...list.querySelector("tbody tr").querySelectorAll("td, time, button")];
            const boxes = parts.map((part) => part.getBoundingClientRect());
            return [boxes.map((box) => [box.left, box.right, box.height]),
                    list.getBoundingClientRect().right, document.documentElement.scrollWidth];
            """,
            f"{table}-list",
        )
        assert boxes
        for left, right, height in boxes:
            assert 0 <= left < right <= edge
            assert height > 0
        assert wide <= 360, "the page must be scrolled sideways on a phone"
        assert HTML_SHOWN in page.text(f"#{table}-table tbody")
        assert raw_in(page, f"#{table}-page") == []


@pytest.mark.ci
def test_in_read_only_mode_nothing_is_changed(app: Celery, fleet: Fleet, chrome: Chrome) -> None:
    flower = Flowers(fleet).start("--read-only", user="admin:secret")
    page = SchedulesPage(chrome, flower)
    page.lists(len(ENTRIES))
    assert "Read-only mode" in page.text("#delays-closed")
    assert not page.found("#schedules-page [data-change]")
    assert flower.ask("/api/delays/schedules/pause", {"name": "late"})[0] == 403
    assert flower.ask("/api/delays/runs/cancel", {"run": "nightly-2"})[0] == 403


@on_one_version
def test_without_a_store_each_page_says_what_to_set(vhost_url: str, tmp_path: Path) -> None:
    with fleet_on(vhost_url, tmp_path) as fleet:
        flower = Flowers(fleet).start()
        for table, rows in (("rates", "lines"), ("schedules", "entries"), ("runs", "list")):
            assert f"/delays/{table}" not in flower.ask("/delays")[1]
            status, said = flower.ask(f"/delays/{table}/{rows}")
            assert (status, "native_delay_store" in said) == (503, True)
            if table != "runs":
                assert f"see native_delay_{table}" in flower.ask(f"/delays/{table}")[1]


@pytest.mark.ci
@pytest.mark.parametrize("page_class", [DelaysPage, RatesPage, SchedulesPage, RunsPage])
def test_a_hanging_broker_hides_the_table_until_it_answers(
    redis: PrivateRedis, flower: FlowerProcess, chrome: Chrome, page_class: type[DelaysPage]
) -> None:
    """Flower answers other requests meanwhile."""
    page = page_class(chrome, flower)
    table = page.find(f"#{page.name}-list")
    page.wait(lambda: " of " in page.text(".dataTables_info"))
    with hung(redis):
        page.wait(lambda: page.text("#delays-error"))
        assert page.name == "delays" or not table.is_displayed()
        assert flower.ask("/healthcheck")[0] == 200
    page.wait(table.is_displayed)
    page.wait(lambda: not page.find("#delays-error").is_displayed())
