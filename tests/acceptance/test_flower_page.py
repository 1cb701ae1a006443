"""The page Delays in Flower as people use it: keyboard, addresses, phones, time zones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from celery import Celery
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By

from celery_native_delay import Delay
from celery_native_delay.bulk import bulk
from celery_native_delay.testing import PrivateRedis
from tests.acceptance.flower import DelaysPage, FlowerProcess, Flowers, browser
from tests.acceptance.worker import Fleet, fleet_on

pytestmark = pytest.mark.ci

TASKS = 60

#: The first is due then, the others an hour apart each; the zone of the app is Europe/Berlin.
FIRST_DUE = datetime(2030, 6, 30, 22, 30, tzinfo=UTC)

UUID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"

#: An override that shows "exe.gnp" as "png.exe", and an escape that colours a terminal.
HOSTILE = "\u202egnp.exe\x1b[31m"

#: The same, shown and not obeyed.
SHOWN = "\\u202egnp.exe\\u001b[31m"


@pytest.fixture(scope="module")
def fleet(redis: PrivateRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_on(redis.url, tmp_path_factory.mktemp("page")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def app(fleet: Fleet) -> Celery:
    return fleet.app()


@pytest.fixture(scope="module")
def flower(fleet: Fleet) -> FlowerProcess:
    return Flowers(fleet).start(FLOWER_UNAUTHENTICATED_API="true")


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    with browser() as chrome:
        # The browser is in another time zone than the app.
        chrome.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "America/New_York"})
        yield chrome


@pytest.fixture
def delay(app: Celery) -> Delay:
    """The ``native_delay`` of an app for which exactly TASKS tasks wait."""
    delay = Delay(app)
    delay.cancel_all(delay.ids())
    with bulk(app) as batch:
        for number in range(TASKS):
            batch.send(
                "note" if number % 3 else "careful",
                (f"order-{number}",),
                task_id=f"task-{number}" if number else UUID,
                eta=FIRST_DUE + number * timedelta(hours=1),
            )
    return delay


@pytest.fixture
def page(delay: Delay, chrome: Chrome, flower: FlowerProcess) -> DelaysPage:
    """The page when these tasks wait."""
    return DelaysPage(chrome, flower)


def test_the_histogram_is_one_tab_stop_with_arrow_keys(delay: Delay, page: DelaysPage) -> None:
    """Tab moves on to the search box; arrow keys reach each bar, and a refresh keeps the focus."""
    page.lists(TASKS)
    page.wait(lambda: page.text(".delays-bar") == "" and page.find(".delays-bar"))
    bars = len(page.found(".delays-bar"))
    assert bars > 10
    assert page.find("#delays-histogram").get_attribute("role") == "toolbar"
    assert page.find("#delays-histogram").get_attribute("aria-label")

    def index() -> int:
        bars = "[...document.querySelectorAll('.delays-bar')]"
        return page.js(f"return {bars}.indexOf(document.activeElement)")

    def press(*keys: str) -> int:
        for key in keys:
            page.chrome.switch_to.active_element.send_keys(key)
        return index()

    (stop,) = page.found(".delays-bar:not([tabindex='-1'])")
    page.js("arguments[0].focus()", stop)
    assert index() == 0
    assert press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT) == 2
    assert press(Keys.ARROW_LEFT) == 1
    assert press(Keys.END) == bars - 1
    assert press(Keys.ARROW_RIGHT) == bars - 1
    assert press(Keys.HOME, Keys.ARROW_LEFT) == 0
    assert press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT) == 3
    within = int(re.match(r"\d+", page.focus("aria-label"))[0])
    press(Keys.ENTER)
    page.lists(within)
    assert (index(), page.focus("aria-pressed")) == (3, "true")
    assert 0 < within < TASKS
    assert page.find("#delays-filter-clear").is_displayed()

    # The figures change under it: another bar is there now, the place is the same.
    delay.cancel(f"task-{TASKS - 1}")
    page.wait(lambda: page.text("#delays-waiting") == str(TASKS - 1))
    assert index() == 3
    press(Keys.TAB)
    for _ in range(2):
        if page.focus("type") != "search":
            press(Keys.TAB)
    assert page.focus("type") == "search"


def test_the_address_holds_search_page_and_times(page: DelaysPage) -> None:
    """A copied address shows the same search, page, page size and times; back and forward work."""

    def info() -> str:
        return page.text(".dataTables_info")

    def searched() -> str:
        return page.find("#delays-table_filter input").get_attribute("value")

    page.lists(TASKS)
    assert page.path() == "/delays"
    page.search("name:note")
    page.lists(40)
    page.wait(lambda: "search=name%3Anote" in page.path())
    page.click(".paginate_button:not(.previous):nth-child(2)")
    shows = "Showing 16 to 30 of 40 tasks"
    page.wait(lambda: shows in info())
    first = page.text("#delays-table tbody tr:first-child .delays-name")
    assert "offset=15" in page.path()
    copied = page.path()

    page.find("#delays-table_length select").send_keys("30")
    page.wait(lambda: "limit=30" in page.path())
    page.click(".delays-bar:nth-child(2)")
    page.wait(lambda: "from_us=" in page.path() and "until_us=" in page.path())
    page.wait(lambda: "(filtered" in info() and " of 40 " not in info())
    within, few, filtered = page.text("#delays-filter-text"), info(), page.path()

    page.chrome.back()
    page.wait(lambda: not page.find("#delays-filter").is_displayed())
    assert "limit=30" in page.path()
    page.chrome.back()
    page.wait(lambda: shows in info())
    assert page.path() == copied
    assert page.find("#delays-table_length select").get_attribute("value") == "15"
    page.chrome.back()
    page.wait(lambda: "Showing 1 to 15 of 40 tasks" in info())
    page.chrome.back()
    page.lists(TASKS)
    assert searched() == ""
    assert page.path() == "/delays"
    page.chrome.forward()
    page.lists(40)
    assert searched() == "name:note"

    page.open(copied.removeprefix("/delays"))
    page.wait(lambda: shows in info())
    assert page.text("#delays-table tbody tr:first-child .delays-name") == first
    assert searched() == "name:note"
    assert page.path() == copied
    page.open(filtered.removeprefix("/delays"))
    page.wait(lambda: page.text("#delays-filter-text") == within)
    page.wait(lambda: info() == few)
    # A page that is there no more is not an empty one, nor is nonsense an error.
    page.open("?search=name:note&offset=4500&limit=7")
    page.wait(lambda: "Showing 31 to 40 of 40 tasks" in info())
    page.open("?offset=-3&limit=x&from_us=soon&until_us=1")
    page.lists(TASKS)
    assert page.complaints() == []


def test_the_error_of_a_search_is_shown_at_the_search_box(page: DelaysPage) -> None:
    page.lists(TASKS)
    box = page.find("#delays-table_filter input")
    assert box.get_attribute("aria-invalid") in (None, "false")
    page.search('"never closed')
    page.wait(lambda: "quote" in page.text("#delays-search-error"))
    error = page.find("#delays-search-error")
    assert error.is_displayed()
    assert box.get_attribute("aria-invalid") == "true"
    assert box.get_attribute("aria-describedby") == "delays-search-error"
    assert 0 <= error.rect["y"] - box.rect["y"] - box.rect["height"] < 30, "beneath the box"
    assert page.text("#toast-container") == ""
    page.wait(lambda: page.text(".dataTables_empty") == "Nothing to show.")
    page.search("name:note")
    page.lists(40)
    assert not error.is_displayed()
    assert box.get_attribute("aria-invalid") == "false"


def test_a_phone_shows_all_of_a_task(page: DelaysPage) -> None:
    with phone(page.chrome):
        page.open("?search=order-0")
        page.lists(1)
        row = page.find("#delays-table tbody tr")
        for text in ("careful", "order-0", UUID, "default"):
            assert text in row.text
        assert page.find(f"#delays-table tbody a[href$='/task/{UUID}']").is_displayed()
        for element in row.find_elements(By.CSS_SELECTOR, "td, a, .delays-more, input, time"):
            assert element.is_displayed()
            assert element.rect["x"] >= 0
            assert element.rect["x"] + element.rect["width"] <= 360
        wide = page.js("return document.documentElement.scrollWidth")
        assert wide <= 360, "the page must be scrolled sideways on a phone"


def test_times_show_their_zone(delay: Delay, page: DelaysPage) -> None:
    """Times are in the app's zone, as in Flower's own list; a tooltip shows UTC."""
    page.lists(TASKS)
    # The numbers and the histogram come by a request of their own.
    page.wait(lambda: page.text("#delays-from") == "2030-07-01 00:00:00 CEST")
    time = "#delays-table tbody tr:first-child time"
    assert "2030-07-01 00:30:00 CEST" in page.text(time)
    for css, name in ((time, "title"), (time, "datetime"), ("#delays-next", "title")):
        assert page.attribute(css, name) == "2030-06-30T22:30:00.000Z"
    assert page.text("#delays-until").endswith(" CEST")
    assert "2030-07-01 00:00:00 CEST until" in page.attribute(".delays-bar", "aria-label")
    page.click(".delays-bar")
    page.wait(lambda: page.text("#delays-filter-text").count(" CEST") == 2)

    page.click("tbody tr:first-child [data-why]")
    page.wait(lambda: "waits in" in page.text("#delays-story-list"))
    assert UUID in page.text("#delays-story-title")
    page.click("#delays-story-dialog .btn-close")
    page.wait(lambda: not page.dialog_is_open("#delays-story-dialog"))
    page.choose("tbody tr:first-child", "[data-one=reschedule]")
    page.question()
    assert page.text("#delays-when-help").endswith("in Europe/Berlin.")
    page.click("#delays-yes")
    page.wait(lambda: "Say when" in page.text("#delays-when-error"))
    assert page.find("#delays-when-error").is_displayed()
    page.find("#delays-at").send_keys("soon")
    page.click("#delays-yes")
    page.wait(lambda: "'soon'" in page.text("#delays-when-error"))
    page.js("$('#delays-at').val('2031-01-01 12:00')")
    page.confirm()
    page.told("1 task rescheduled")
    assert delay.show(UUID)[0].due == datetime(2031, 1, 1, 11, tzinfo=UTC)


def test_overdue_tasks_are_explained(app: Celery, delay: Delay, page: DelaysPage) -> None:
    """No worker runs. Ids are shown whole, the histogram has a scale, and no internal name."""
    app.send_task("note", countdown=1)
    page.wait(lambda: page.text("#delays-overdue") == "1")
    assert page.attribute("#delays-next", "title") == "2030-06-30T22:30:00.000Z"
    page.wait(lambda: "message(s) overdue, the first for" in page.text("#delays-problems"))
    assert "start an installed worker" in page.text("#delays-problems small")
    assert page.find("#delays-problems").is_displayed()
    page.search(UUID)
    page.lists(1)
    assert page.text("tbody .delays-id code") == UUID
    cut = "return arguments[0].scrollWidth > arguments[0].clientWidth"
    assert not page.js(cut, page.find("tbody .delays-id code"))
    most = max(count for *_, count in page.flower.json("/delays/summary")["histogram"])
    scale = [int(each.text) for each in page.found("#delays-scale :not(:empty)")]
    assert scale[0] >= most > scale[-1] == 0
    assert "celery_delay" not in page.text("#delays-page > :not(ul)")
    delay.cancel_all(delay.ids())


def test_control_characters_are_escaped(app: Celery, delay: Delay, page: DelaysPage) -> None:
    """In names, ids, arguments, queues and keys, at every place of the page."""
    delay.cancel_all(delay.ids())
    delay.debounce(app.signature("note"), key=f"user:7{HOSTILE}", seconds=9000)
    app.send_task(f"n{HOSTILE}", (HOSTILE, "שלום"), task_id=f"i{HOSTILE}", countdown=9000)
    page.open("?search=key:user:7")
    page.lists(1)
    assert page.text("tbody .delays-name small") == f"debounce user:7{SHOWN}"
    assert raw_in(page, "#delays-page") == []
    page.search("args:gnp")
    page.lists(1)
    for css in ("tbody .delays-name", "tbody .delays-id", "tbody .delays-args"):
        assert SHOWN in page.text(css), css
    assert "שלום" in page.text("tbody .delays-args")
    assert page.find("tbody .delays-args bdi")
    assert raw_in(page, "#delays-page") == []
    page.choose("tbody", "[data-one=cancel]")
    page.question()
    assert page.text("#delays-chosen").count(SHOWN) == 2
    assert raw_in(page, "#delays-dialog") == []
    page.confirm()
    page.told("1 task cancelled")


# ---- private ---------------------------------------------------------------------------------


@contextmanager
def phone(chrome: Chrome) -> Iterator[None]:
    """A browser window as wide as a phone."""
    chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True},
    )
    try:
        yield
    finally:
        chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def raw_in(page: DelaysPage, css: str) -> list[str]:
    """Texts and titles below an element that contain a control character."""
    return page.js(
        r"""
        const obeyed = /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/;
        return [...document.querySelectorAll(`${arguments[0]} *`)].flatMap((each) =>
            [each.textContent, ...[...each.attributes].map((one) => one.value)]
        ).filter((text) => obeyed.test(text));
        """,
        css,
    )
