"""The page Schedules in Flower and its REST API: schedule entries, paused, resumed and run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from celery import Celery
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By

from celery_native_delay import Delay
from celery_native_delay.app.schedules import Scheduled, Schedules
from celery_native_delay.testing import PrivateRedis
from tests.acceptance.flower import DelaysPage, FlowerProcess, flowers_on
from tests.acceptance.test_flower_page import HOSTILE, SHOWN, phone, raw_in
from tests.acceptance.worker import fleet_on
from tests.brokers import on_one_version
from tests.waiting import wait_until

#: Names that a URL, HTML or a path would change.
STRANGE = ["..", "a/b?c=d#e&f%2Fg é\n+", f'<b title="x">{HOSTILE}</b>']

#: No worker runs, so the entry "late" is due after a second and stays so.
ENTRIES = {
    "late": {"task": "note", "schedule": 1.0},
    **{f"hourly-{n:02}": {"task": "note", "schedule": 3600.0 + n} for n in range(10)},
    **{name: {"task": "shop.report", "schedule": 86_400.0} for name in STRANGE},
}
CONF: dict[str, Any] = {"native_delay_schedules": True, "beat_schedule": ENTRIES}


class SchedulesPage(DelaysPage):
    """The page as a user sees it: methods read the visible table, and press its buttons."""

    path_of_page = "/delays/schedules"

    def row(self, name: str) -> list[str]:
        """The cell texts of an entry."""
        found: list[str] = self.chrome.execute_script(
            "const row = document.getElementById('entry-' + encodeURIComponent(arguments[0]));"
            "return row ? [...row.cells].map(c => c.textContent.replace(/\\s+/g, ' ').trim()) : []",
            name,
        )
        return found

    def press(self, name: str, verb: str, key: str = Keys.ENTER) -> None:
        """Press a button of an entry with the keyboard; try again if the press missed the button.

        The page may redraw the table in between, and then moves the focus to the new button.
        """
        self.chrome.execute_script(
            "const [name, verb] = arguments; window.pressed = false;"
            "document.addEventListener('click', (event) => {"
            "  const row = document.getElementById('entry-' + encodeURIComponent(name));"
            "  const button = row && row.querySelector(`[data-change=${verb}]`);"
            "  if (button && button.contains(event.target)) window.pressed = true;"
            "}, true)",
            name,
            verb,
        )

        def pressed() -> bool:
            focused = self.chrome.execute_script(
                "const row = document.getElementById('entry-' + encodeURIComponent(arguments[0]));"
                "const found = row && row.querySelector(`[data-change=${arguments[1]}]`);"
                "if (found) found.focus(); return Boolean(found)",
                name,
                verb,
            )
            if focused:
                ActionChains(self.chrome).send_keys(key).perform()
            return bool(self.chrome.execute_script("return window.pressed"))

        self.wait(pressed)

    def asks(self) -> bool:
        return self.dialog_is_open("#schedules-dialog")

    def question(self) -> str:
        self.wait(self.asks)
        return self.text("#schedules-question")


@pytest.fixture(scope="module")
def app(redis: PrivateRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Celery]:
    with fleet_on(redis.url, tmp_path_factory.mktemp("entries"), **CONF) as fleet:
        app = fleet.app()
        Schedules(app).publish()
        yield app


@pytest.fixture(scope="module")
def flower(app: Celery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowerProcess]:
    folder = tmp_path_factory.mktemp("flower")
    with fleet_on(app.conf.broker_url, folder, **CONF) as fleet, flowers_on(fleet) as flowers:
        yield flowers.start(user="admin:secret", prefix="ops/flower")


def entry_of(app: Celery, name: str) -> Scheduled:
    return {each.name: each for each in Delay(app).schedules()}[name]


def test_the_page_lists_finds_and_sorts_schedule_entries(
    app: Celery, flower: FlowerProcess, chrome: Chrome
) -> None:
    """With a password and under a URL prefix. If schedules are on, a link leads to the page."""
    DelaysPage(chrome, flower).click("a.nav-link[href$='/delays/schedules']")
    page = SchedulesPage(chrome, flower, None)
    page.lists(len(ENTRIES))
    assert page.text("#schedules-entries") == str(len(ENTRIES))
    assert page.text("#schedules-paused") == "0"
    name, task, schedule, last, due, runs, late, _ = page.row("hourly-00")
    assert [name, task, schedule, last] == ["hourly-00", "note", "every 1 h", "\u2014"]
    assert due.startswith("in ")
    assert [runs, late] == ["0", "\u2014"]
    page.wait(lambda: page.text("#schedules-next").startswith("59 min"))
    page.wait(lambda: page.row("late")[6].endswith(" s"))

    page.find("#schedules-table_filter input").send_keys("every 1 h 9 s")
    page.lists(1)
    assert page.row("hourly-09")[2] == "every 1 h 9 s"
    chrome.execute_script(
        "var button = document.querySelector('#schedules-table [data-change=pause]');"
        "button.focus(); button.dataset.old = 'yes'"
    )
    page.wait(lambda: not chrome.find_elements(By.CSS_SELECTOR, "[data-old]"))
    assert page.focus("aria-label") == "Pause hourly-09", "the table was drawn again"
    assert page.complaints() == []


def test_an_entry_is_paused_resumed_and_run_with_the_keyboard(
    app: Celery, redis: PrivateRedis, flower: FlowerProcess, chrome: Chrome
) -> None:
    page = SchedulesPage(chrome, flower)
    page.lists(len(ENTRIES))
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
    page.wait(lambda: not page.asks())
    page.wait(lambda: page.focus("aria-label") == "Run hourly-04 now")
    assert redis.client.llen("default") == waiting
    page.press("hourly-04", "run-now")
    page.question()
    page.click("#schedules-yes")
    page.told("hourly-04 runs once more")
    wait_until(lambda: redis.client.llen("default") == waiting + 1)
    assert entry_of(app, "hourly-04").next_due == due
    assert page.complaints() == []


def test_the_rest_api_knows_entries_of_any_name(app: Celery, flower: FlowerProcess) -> None:
    def listed() -> dict[str, Any]:
        answer = flower.json("/api/delays/schedules")
        return {entry["name"]: entry for entry in answer["entries"]}

    assert sorted(listed()) == sorted(ENTRIES)
    wait_until(lambda: listed()["late"]["late_seconds"] > 0)
    for name in (*STRANGE, "hourly-05"):
        path = f"/api/delays/schedules/{{}}/{quote(name, safe='')}"
        assert flower.json(path.format("pause"), {}) == {"name": name, "task_id": None}
        assert entry_of(app, name).is_paused
        assert flower.json("/api/delays/schedules/resume", {"name": name})["name"] == name
        assert not entry_of(app, name).is_paused
        assert flower.json(path.format("run-now"), {})["task_id"]
    status, said = flower.ask("/api/delays/schedules/pause/other", {})
    assert status == 404
    assert "expected the name of a schedule entry, got 'other'" in said
    assert flower.ask("/api/delays/schedules/pause", {})[0] == 400
    assert flower.ask("/api/delays/schedules/pause/late", {}, user="admin:wrong")[0] == 401
    assert flower.ask("/api/delays/schedules", user="admin:wrong")[0] == 401


def test_an_entry_is_added_changed_and_removed(
    app: Celery, flower: FlowerProcess, chrome: Chrome
) -> None:
    """A wrong field is explained in the dialog; entries of the code have no such buttons."""
    page = SchedulesPage(chrome, flower)
    page.lists(len(ENTRIES))
    assert not chrome.find_elements(By.CSS_SELECTOR, "[data-change=remove]")

    def fill(**fields: str) -> None:
        page.wait(lambda: page.dialog_is_open("#schedules-edit"))
        for field, text in fields.items():
            chrome.execute_script(f"$('#schedules-edit-{field}').val(arguments[0])", text)
        page.click("#schedules-edit-yes")

    page.click("#schedules-add")
    fill(name="aaa", task="note", schedule="now and then", args="[7]")
    page.wait(lambda: "'every 10 s'" in page.text("#schedules-edit-error"))
    fill(args="7,")
    page.wait(lambda: "are JSON" in page.text("#schedules-edit-error"))
    fill(schedule="every 2 h", args="[7]")
    page.told("aaa is added")
    page.wait(lambda: page.row("aaa")[2:3] == ["every 2 h added here"])
    page.press("aaa", "change")
    fill(schedule="every 3 h")
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
    assert flower.ask("/api/delays/schedules/remove", {"name": "unknown"})[0] == 404
    assert all("400 (Bad Request)" in each for each in page.complaints()), "the refused schedule"


@pytest.mark.ci
def test_in_read_only_mode_nothing_can_be_changed(
    app: Celery, chrome: Chrome, tmp_path: Path
) -> None:
    with fleet_on(app.conf.broker_url, tmp_path, **CONF) as fleet, flowers_on(fleet) as flowers:
        flower = flowers.start("--read-only", user="admin:secret")
        page = SchedulesPage(chrome, flower)
        page.lists(len(ENTRIES))
        assert "Read-only mode" in page.text("#delays-closed")
        assert not chrome.find_elements(By.CSS_SELECTOR, "#schedules-page [data-change]")
        assert flower.ask("/api/delays/schedules/pause/late", {})[0] == 403
        assert not entry_of(app, "late").is_paused


@pytest.mark.ci
def test_a_phone_shows_all_columns_and_buttons(flower: FlowerProcess, chrome: Chrome) -> None:
    with phone(chrome):
        page = SchedulesPage(chrome, flower)
        page.lists(len(ENTRIES))
        # In one go: the table is drawn again every few seconds.
        shown, boxes, wide, edge = chrome.execute_script(
            """
            const row = document.getElementById("entry-hourly-01");
            const parts = [...row.querySelectorAll("td, a, time, button")];
            const boxes = parts.map((part) => part.getBoundingClientRect());
            return [row.innerText, boxes.map((box) => [box.left, box.right, box.height]),
                    document.documentElement.scrollWidth,
                    document.getElementById("schedules-list").getBoundingClientRect().right];
            """
        )
        for text in ("hourly-01", "note", "every 1 h 1 s", "Pause", "Run now"):
            assert text in shown
        assert "in 1 h" in shown or "in 59 min" in shown
        for left, right, height in boxes:
            assert 0 <= left < right <= edge
            assert height > 0
        assert wide <= 360, "the page must be scrolled sideways on a phone"


@pytest.mark.ci
def test_a_hostile_name_is_escaped(flower: FlowerProcess, chrome: Chrome) -> None:
    page = SchedulesPage(chrome, flower)
    page.wait(lambda: page.row(STRANGE[2]))
    shown = f'<b title="x">{SHOWN}</b>'
    assert page.row(STRANGE[2])[0] == shown
    page.press(STRANGE[2], "run-now")
    assert page.question() == f"Run {shown} now?"
    page.click("#schedules-yes")
    page.told(f"{shown} runs once more")
    element = "document.querySelector('#schedules-page')"
    assert [text for text in raw_in(chrome, element) if "\n" not in text] == []


@pytest.mark.ci
def test_an_unreachable_store_hides_the_table(
    redis: PrivateRedis, flower: FlowerProcess, chrome: Chrome
) -> None:
    page = SchedulesPage(chrome, flower)
    page.lists(len(ENTRIES))
    redis.kill()
    page.wait(lambda: "Connection refused" in page.text("#delays-error"))
    assert page.text("#schedules-entries") == page.text("#schedules-next") == "\u2014"
    assert not page.find("#schedules-list").is_displayed()
    redis.start()
    page.wait(lambda: page.find("#schedules-list").is_displayed())
    assert not page.find("#delays-error").is_displayed()


@on_one_version
def test_without_schedules_there_is_no_link_and_the_page_says_how_to_set_them(
    vhost_url: str, tmp_path: Path
) -> None:
    """Also on RabbitMQ without a store."""
    with fleet_on(vhost_url, tmp_path) as fleet, flowers_on(fleet) as flowers:
        flower = flowers.start()
        assert "/delays/schedules" not in flower.ask("/delays")[1]
        assert "see native_delay_schedules" in flower.ask("/delays/schedules")[1]
        status, said = flower.ask("/delays/schedules/entries")
        assert status == 503
        assert "native_delay_store" in said
