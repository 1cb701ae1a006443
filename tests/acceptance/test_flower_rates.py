"""The page Rates in Flower and its REST API: the queues of rate-limited tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from celery import Celery
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from celery_native_delay import Delay
from celery_native_delay.testing import PrivateRedis
from tests.acceptance.flower import DelaysPage, FlowerProcess, flowers_on
from tests.acceptance.test_flower_page import HOSTILE, SHOWN, phone, raw_in
from tests.acceptance.worker import fleet_on
from tests.brokers import on_one_version
from tests.lines import fill

#: The rate is so low that no waiting task starts during the tests.
RATES = {"shop.call_api": "100/d", "shop.send_mail": "10/d"}

TENANTS = 20


class RatesPage(DelaysPage):
    """The page as a user sees it: methods read the visible table."""

    path_of_page = "/delays/rates"

    def rows(self) -> list[list[str]]:
        """The cell texts of the first rows of the table."""
        found: list[list[str]] = self.chrome.execute_script(
            "return Array.from(document.querySelectorAll('#rates-table tbody tr')).map(row =>"
            " Array.from(row.cells).map(cell => cell.textContent.replace(/\\s+/g, ' ').trim()))"
        )
        return found

    def search(self, text: str) -> None:
        box = self.find("#rates-table_filter input")
        box.clear()
        box.send_keys(text)


def fill_rate_queues(app: Celery) -> None:
    """Queue 1 to 20 tasks for each tenant, and some for the paused rate of all mail."""
    for number in range(TENANTS):
        fill(app, "shop.call_api", f"tenant-{number}", "100/d", waiting=TENANTS - number)
    fill(app, "shop.send_mail", None, "10/d", waiting=99, held_seconds=90_000)
    Delay(app).set_rate("shop.call_api", "tenant-3", "200/d")


@pytest.fixture(scope="module")
def app(redis: PrivateRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Celery]:
    with fleet_on(redis.url, tmp_path_factory.mktemp("lines"), native_delay_rates=RATES) as fleet:
        app = fleet.app()
        fill_rate_queues(app)
        yield app


@pytest.fixture(scope="module")
def flower(app: Celery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowerProcess]:
    folder = tmp_path_factory.mktemp("flower")
    with (
        fleet_on(app.conf.broker_url, folder, native_delay_rates=RATES) as fleet,
        flowers_on(fleet) as flowers,
    ):
        yield flowers.start(user="admin:secret", prefix="ops/flower")


def test_the_page_lists_finds_and_sorts_the_queues_of_rates(
    app: Celery, flower: FlowerProcess, chrome: Chrome
) -> None:
    """With a password and under a URL prefix. If rates are set, a link leads to the page."""
    DelaysPage(chrome, flower).click("a.nav-link[href$='/delays/rates']")
    page = RatesPage(chrome, flower, None)
    page.lists(TENANTS + 1)
    assert page.text("#rates-waiting") == str(sum(range(1, TENANTS + 1)) + 100)
    assert page.text("#rates-lines") == str(TENANTS + 1)
    assert page.text("#rates-held") == "1"
    rows = page.rows()
    assert len(rows) == 15
    *mail, slot, used = rows[0]
    assert mail == ["shop.send_mail", "\u2014", "10/d", "100"]
    assert re.fullmatch(r"in 1 d \d+ min held until 20\d\d-\d\d-\d\d [\d:]+ CES?T", slot)
    assert used == "10 %1 start"
    assert rows[1][:4] == ["shop.call_api", "tenant-0", "100/d", "20"]
    assert [row[3] for row in rows[1:]] == [str(n) for n in range(20, 6, -1)]
    assert rows[4][1:3] == ["tenant-3", "200/d overridden"]

    page.search("tenant-1")
    page.lists(11)
    page.click("#rates-table th:nth-child(4)")
    page.wait(lambda: page.rows()[0][1] == "tenant-19")
    chrome.execute_script(
        "var link = document.querySelector('#rates-table tbody tr:first-child a');"
        "link.focus(); link.dataset.old = 'yes'"
    )
    page.wait(lambda: not chrome.find_elements(By.CSS_SELECTOR, "[data-old]"))
    assert page.rows()[0][1] == "tenant-19", "it was drawn again, in another order"
    assert (page.focus("href") or "").endswith("/delays?search=name%3Ashop.call_api")
    assert page.complaints() == []

    lines = flower.json("/api/delays/rates?limit=2")
    assert lines == {"more": True, "lines": [line.as_json() for line in Delay(app).rates()[:2]]}
    held_until = datetime.fromisoformat(lines["lines"][0]["held_until"])
    assert held_until > datetime.now(UTC) + timedelta(hours=24)
    assert flower.ask("/api/delays/rates?limit=0")[0] == 400
    assert flower.ask("/delays/rates/lines", user="admin:wrong")[0] == 401


@pytest.mark.ci
def test_a_phone_shows_all_columns(flower: FlowerProcess, chrome: Chrome) -> None:
    with phone(chrome):
        page = RatesPage(chrome, flower)
        page.lists(TENANTS + 1)
        # In one go: the table is drawn again every few seconds.
        shown, boxes, wide = chrome.execute_script(
            """
            const row = document.querySelector("#rates-table tbody tr");
            const parts = [...row.querySelectorAll("td, a, time, .rates-bar")];
            const boxes = parts.map((part) => part.getBoundingClientRect());
            return [row.innerText, boxes.map((box) => [box.left, box.right, box.height]),
                    document.documentElement.scrollWidth];
            """
        )
        for text in ("shop.send_mail", "10/d", "100", "held until", "10", "1 start"):
            assert text in shown
        assert boxes
        for left, right, height in boxes:
            assert 0 <= left < right <= 360
            assert height > 0
        assert wide <= 360, "the page must be scrolled sideways on a phone"


@pytest.mark.ci
def test_a_hostile_key_is_escaped(app: Celery, flower: FlowerProcess, chrome: Chrome) -> None:
    fill(app, "shop.call_api", f"<b>{HOSTILE}</b>", "100/d", waiting=1000)
    page = RatesPage(chrome, flower)
    page.wait(lambda: SHOWN in page.text("#rates-table tbody .rates-key"))
    assert page.text("#rates-table tbody .rates-key") == f"<b>{SHOWN}</b>"
    assert raw_in(chrome, "document.querySelector('#rates-page')") == []


@pytest.mark.ci
def test_an_unreachable_store_of_rates_hides_the_table(
    redis: PrivateRedis, flower: FlowerProcess, chrome: Chrome
) -> None:
    """The page names the URL without its password and the error; later it shows the table again."""
    page = RatesPage(chrome, flower)
    page.wait(lambda: page.text("#rates-held") == "1")
    redis.kill()
    page.wait(lambda: "Connection refused" in page.text("#delays-error"))
    assert page.text("#rates-waiting") == page.text("#rates-next") == "\u2014"
    assert not page.find("#rates-list").is_displayed()
    assert "**@" in page.text("#delays-error")
    redis.start()
    page.wait(lambda: page.find("#rates-list").is_displayed())
    assert not page.find("#delays-error").is_displayed()


@on_one_version
def test_without_rates_there_is_no_link_and_the_page_says_how_to_set_them(
    vhost_url: str, tmp_path: Path
) -> None:
    """Also on RabbitMQ without a store."""
    with fleet_on(vhost_url, tmp_path) as fleet, flowers_on(fleet) as flowers:
        flower = flowers.start()
        assert "/delays/rates" not in flower.ask("/delays")[1]
        assert "see native_delay_rates" in flower.ask("/delays/rates")[1]
        status, said = flower.ask("/delays/rates/lines")
        assert status == 503
        assert "native_delay_store" in said
