"""The page Runs in Flower and its REST API: what Spark jobs have sent, cancelled and moved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from celery import Celery
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from celery_native_delay import Delay, Run
from celery_native_delay.testing import PrivateRedis
from tests.acceptance.flower import DelaysPage, FlowerProcess, flowers_on
from tests.acceptance.test_flower_page import HOSTILE, SHOWN, phone
from tests.acceptance.test_runs import send
from tests.acceptance.worker import fleet_on
from tests.brokers import on_one_version
from tests.hanging import hung

RUNS = ("nightly-1", "nightly-2", f'<b>"{HOSTILE}</b>')

ROW = "#runs-table tbody tr[id='run-nightly-1']"


class RunsPage(DelaysPage):
    """The page as a user sees it: methods read the visible table."""

    path_of_page = "/delays/runs"

    def row(self, css: str = ROW) -> list[str]:
        """The cell texts of a run, without its buttons; Began is left out."""
        found: list[str] = self.chrome.execute_script(
            "const row = document.querySelector(arguments[0]);"
            "return row ? [...row.cells].map((cell) => cell.textContent.trim()) : []",
            css,
        )
        return found[:2] + found[3:9]

    def dialog_is_open(self, css: str = "#runs-dialog") -> bool:
        return super().dialog_is_open(css)


@pytest.fixture(scope="module")
def app(redis: PrivateRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Celery]:
    with fleet_on(redis.url, tmp_path_factory.mktemp("runs")) as fleet:
        app = fleet.app()
        for number, run_id in enumerate(RUNS):
            send(app, run_id, 5 + number, countdown=3600)
        yield app


@pytest.fixture(scope="module")
def flower(app: Celery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowerProcess]:
    folder = tmp_path_factory.mktemp("flower")
    with fleet_on(app.conf.broker_url, folder) as fleet, flowers_on(fleet) as flowers:
        yield flowers.start(user="admin:secret", prefix="ops/flower")


def test_the_page_counts_moves_and_cancels_runs(
    app: Celery, flower: FlowerProcess, chrome: Chrome
) -> None:
    """Under a URL prefix. A link leads to the page once a run is known; names are escaped."""
    flower.json("/delays/summary")
    DelaysPage(chrome, flower).click("a.nav-link[href$='/delays/runs']")
    page = RunsPage(chrome, flower, None)
    page.lists(len(RUNS))
    page.wait(lambda: page.row() == ["nightly-1", "note", "6", "5", "1", "5", "0", ""])
    links = chrome.find_elements(By.CSS_SELECTOR, "#runs-table td a[href*='search=run']")
    hrefs = {link.text: str(link.get_attribute("href")) for link in links}
    (search,) = parse_qs(urlsplit(hrefs[f'<b>"{SHOWN}</b>']).query)["search"]
    assert Delay(app).count(search) == 7

    before = Delay(app).ls('run:"nightly-1"')[0].due
    page.click(f"{ROW} [data-change=reschedule]")
    page.wait(lambda: page.dialog_is_open() and page.focus("id") == "runs-by")
    page.find("#runs-by").send_keys("soon")
    page.click("#runs-yes")
    page.wait(lambda: "by: expected" in page.text("#runs-wrong"))
    page.find("#runs-by").clear()
    page.find("#runs-by").send_keys("1 h")
    page.click("#runs-yes")
    page.told("5 task(s) moved")
    page.wait(lambda: page.row()[-1] == "moved by 1 h")
    assert round((Delay(app).ls('run:"nightly-1"')[0].due - before).total_seconds()) == 3600

    page.click(f"{ROW} [data-change=cancel]")
    page.wait(page.dialog_is_open)
    assert page.text("#runs-question") == "Cancel run nightly-1?"
    page.click("#runs-yes")
    page.wait(lambda: page.row()[-1] == "cancelled")
    assert [Run(each, app=app).status().cancelled for each in RUNS] == [True, False, False]
    with phone(chrome):
        assert chrome.execute_script("return document.documentElement.scrollWidth") <= 360
    assert all("400 (Bad Request)" in each for each in page.complaints()), "the refused duration"


def test_the_api_changes_runs_and_says_what_it_expects(app: Celery, flower: FlowerProcess) -> None:
    (run,) = [each for each in flower.json("/api/delays/runs")["runs"] if each["sent"] == 6]
    assert run == Run("nightly-2", app=app).status().as_json()
    for verb, body, said in (
        ("cancel", {"run": "unknown"}, "expected the name of a run that was sent"),
        ("cancel", {}, "expected the name of a run"),
        ("reschedule", {"run": "nightly-2"}, "to reschedule it by"),
    ):
        status, text = flower.ask(f"/api/delays/runs/{verb}", body)
        assert (status, said in text) == (400, True), text
    moved = flower.json("/api/delays/runs/reschedule", {"run": "nightly-2", "by": "30m"})
    assert moved == {"run": "nightly-2", "message": "6 task(s) moved"}
    assert flower.ask("/api/delays/runs", user="admin:wrong")[0] == 401


@pytest.mark.ci
def test_a_hanging_broker_hides_the_table_until_it_answers(
    redis: PrivateRedis, flower: FlowerProcess, chrome: Chrome
) -> None:
    page = RunsPage(chrome, flower)
    page.lists(len(RUNS))
    with hung(redis):
        page.wait(lambda: page.text("#delays-error"))
        assert not page.find("#runs-list").is_displayed()
    page.wait(lambda: page.find("#runs-list").is_displayed())


@on_one_version
def test_without_a_store_the_page_says_how_to_set_one_and_read_only_mode_changes_nothing(
    vhost_url: str, tmp_path: Path
) -> None:
    with fleet_on(vhost_url, tmp_path) as fleet, flowers_on(fleet) as flowers:
        flower = flowers.start("--read-only", user="admin:secret")
        assert "/delays/runs" not in flower.ask("/delays")[1]
        status, said = flower.ask("/delays/runs/list")
        assert (status, "native_delay_store" in said) == (503, True)
        assert flower.ask("/api/delays/runs/cancel", {"run": "x"})[0] == 403
