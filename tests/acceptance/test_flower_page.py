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
from celery_native_delay.testing import private_redis
from tests.acceptance.flower import DelaysPage, FlowerProcess, browser, flowers_on
from tests.acceptance.worker import fleet_on

pytestmark = pytest.mark.ci

TASKS = 60

#: The first is due then, the others an hour apart each; the zone of the app is Europe/Berlin.
FIRST_DUE = datetime(2030, 6, 30, 22, 30, tzinfo=UTC)

UUID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"

#: An override that shows "exe.gnp" as "png.exe", and an escape that colours a terminal.
HOSTILE = "\u202egnp.exe\x1b[31m"

#: The same, shown and not obeyed.
SHOWN = "\\u202egnp.exe\\u001b[31m"


def task_id(number: int) -> str:
    return UUID if number == 0 else f"task-{number}"


def fill(app: Celery) -> None:
    with bulk(app) as batch:
        for number in range(TASKS):
            batch.send(
                "note" if number % 3 else "careful",
                (f"order-{number}",),
                task_id=task_id(number),
                eta=FIRST_DUE + number * timedelta(hours=1),
            )


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Celery]:
    with private_redis() as redis, fleet_on(redis.url, tmp_path_factory.mktemp("page")) as fleet:
        yield fleet.app()


@pytest.fixture(scope="module")
def flower(app: Celery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowerProcess]:
    folder = tmp_path_factory.mktemp("flower")
    with fleet_on(app.conf.broker_url, folder) as fleet, flowers_on(fleet) as flowers:
        yield flowers.start(FLOWER_UNAUTHENTICATED_API="true")


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    with browser() as chrome:
        # The browser is in another time zone than the app.
        chrome.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "America/New_York"})
        yield chrome


@pytest.fixture
def delay(app: Celery) -> Delay:
    """The ``native_delay`` of an app whose waiting tasks are exactly those of `fill`."""
    delay = Delay(app)
    delay.cancel_all(delay.ids())
    fill(app)
    return delay


def test_the_histogram_is_one_tab_stop_with_arrow_keys(
    delay: Delay, chrome: Chrome, flower: FlowerProcess
) -> None:
    """Tab moves on to the search box; arrow keys reach each bar, and a refresh keeps the focus."""
    page = DelaysPage(chrome, flower)
    page.lists(TASKS)
    page.wait(lambda: page.text(".delays-bar") == "" and page.find(".delays-bar"))
    bars = len(chrome.find_elements(By.CSS_SELECTOR, ".delays-bar"))
    assert bars > 10
    assert page.find("#delays-histogram").get_attribute("role") == "toolbar"
    assert page.find("#delays-histogram").get_attribute("aria-label")

    def index() -> int:
        found: int = chrome.execute_script(
            "return Array.from(document.querySelectorAll('.delays-bar'))"
            ".indexOf(document.activeElement)"
        )
        return found

    def press(*keys: str) -> int:
        for key in keys:
            chrome.switch_to.active_element.send_keys(key)
        return index()

    stops = chrome.find_elements(By.CSS_SELECTOR, ".delays-bar:not([tabindex='-1'])")
    assert len(stops) == 1
    chrome.execute_script("arguments[0].focus()", stops[0])
    assert index() == 0
    assert press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT) == 2
    assert press(Keys.ARROW_LEFT) == 1
    assert press(Keys.END) == bars - 1
    assert press(Keys.ARROW_RIGHT) == bars - 1
    assert press(Keys.HOME, Keys.ARROW_LEFT) == 0
    assert press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT) == 3
    within = int(re.match(r"\d+", page.focus("aria-label") or "")[0])  # type: ignore[index]
    press(Keys.ENTER)
    page.lists(within)
    assert (index(), page.focus("aria-pressed")) == (3, "true")
    assert 0 < within < TASKS
    assert page.find("#delays-filter-clear").is_displayed()

    # The figures change under it: another bar is there now, the place is the same.
    delay.cancel(task_id(TASKS - 1))
    page.wait(lambda: page.text("#delays-waiting") == str(TASKS - 1))
    assert index() == 3
    press(Keys.TAB)
    for _ in range(2):
        if page.focus("type") != "search":
            press(Keys.TAB)
    assert page.focus("type") == "search"
    chrome.switch_to.active_element.send_keys(Keys.SHIFT, Keys.TAB)


def test_the_address_holds_search_page_and_times(
    delay: Delay, chrome: Chrome, flower: FlowerProcess
) -> None:
    """A copied address shows the same search, page, page size and times; back and forward work."""
    page = DelaysPage(chrome, flower)

    def info() -> str:
        return page.text(".dataTables_info")

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

    chrome.back()
    page.wait(lambda: not page.find("#delays-filter").is_displayed())
    assert "limit=30" in page.path()
    chrome.back()
    page.wait(lambda: shows in info())
    assert page.path() == copied
    assert page.find("#delays-table_length select").get_attribute("value") == "15"
    chrome.back()
    page.wait(lambda: "Showing 1 to 15 of 40 tasks" in info())
    chrome.back()
    page.lists(TASKS)
    assert page.find("#delays-table_filter input").get_attribute("value") == ""
    assert page.path() == "/delays"
    chrome.forward()
    page.lists(40)
    assert page.find("#delays-table_filter input").get_attribute("value") == "name:note"

    page = DelaysPage(chrome, flower, copied.removeprefix("/delays"))
    page.wait(lambda: shows in info())
    assert page.text("#delays-table tbody tr:first-child .delays-name") == first
    assert page.find("#delays-table_filter input").get_attribute("value") == "name:note"
    assert page.path() == copied
    page = DelaysPage(chrome, flower, filtered.removeprefix("/delays"))
    page.wait(lambda: page.text("#delays-filter-text") == within)
    page.wait(lambda: info() == few)
    # A page that is there no more is not an empty one, nor is nonsense an error.
    page = DelaysPage(chrome, flower, "?search=name:note&offset=4500&limit=7")
    page.wait(lambda: "Showing 31 to 40 of 40 tasks" in info())
    page = DelaysPage(chrome, flower, "?offset=-3&limit=x&from_us=soon&until_us=1")
    page.lists(TASKS)
    assert page.complaints() == []


def test_the_error_of_a_search_is_shown_at_the_search_box(
    delay: Delay, chrome: Chrome, flower: FlowerProcess
) -> None:
    page = DelaysPage(chrome, flower)
    page.lists(TASKS)
    box = page.find("#delays-table_filter input")
    assert box.get_attribute("aria-invalid") in (None, "false")
    page.search('"never closed')
    page.wait(lambda: "quote" in page.text("#delays-search-error"))
    error = page.find("#delays-search-error")
    assert error.is_displayed()
    assert box.get_attribute("aria-invalid") == "true"
    assert box.get_attribute("aria-describedby") == "delays-search-error"
    gap = error.rect["y"] - box.rect["y"] - box.rect["height"]
    assert 0 <= gap < 30, "beneath the box"
    assert page.text("#toast-container") == ""
    page.wait(lambda: page.text(".dataTables_empty") == "Nothing to show.")
    page.search("name:note")
    page.lists(40)
    assert not error.is_displayed()
    assert box.get_attribute("aria-invalid") == "false"


def test_a_phone_shows_all_of_a_task(delay: Delay, chrome: Chrome, flower: FlowerProcess) -> None:
    with phone(chrome):
        page = DelaysPage(chrome, flower, "?search=order-0")
        page.lists(1)
        row = page.find("#delays-table tbody tr")
        for text in ("careful", "order-0", UUID, "default"):
            assert text in row.text
        link = page.find(f"#delays-table tbody a[href$='/task/{UUID}']")
        assert link.is_displayed()
        for element in row.find_elements(By.CSS_SELECTOR, "td, a, .delays-more, input, time"):
            assert element.is_displayed()
            assert element.rect["x"] >= 0
            assert element.rect["x"] + element.rect["width"] <= 360
        wide = chrome.execute_script("return document.documentElement.scrollWidth")
        assert wide <= 360, "the page must be scrolled sideways on a phone"


def test_times_show_their_zone(delay: Delay, chrome: Chrome, flower: FlowerProcess) -> None:
    """Times are in the app's zone, as in Flower's own list; a tooltip shows UTC."""
    page = DelaysPage(chrome, flower)
    page.lists(TASKS)
    # The numbers and the histogram come by a request of their own.
    page.wait(lambda: page.text("#delays-from") == "2030-07-01 00:00:00 CEST")
    time = "#delays-table tbody tr:first-child time"
    assert "2030-07-01 00:30:00 CEST" in page.text(time)
    assert page.attribute(time, "title") == "2030-06-30T22:30:00.000Z"
    assert page.attribute(time, "datetime") == "2030-06-30T22:30:00.000Z"
    assert page.text("#delays-until").endswith(" CEST")
    assert page.attribute("#delays-next", "title") == "2030-06-30T22:30:00.000Z"
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
    chrome.execute_script("$('#delays-at').val('2031-01-01 12:00')")
    page.confirm()
    page.told("1 task rescheduled")
    assert delay.show(UUID)[0].due == datetime(2031, 1, 1, 11, tzinfo=UTC)


def test_overdue_tasks_are_explained_and_do_not_hide_the_next_due_time(
    app: Celery, delay: Delay, chrome: Chrome, flower: FlowerProcess
) -> None:
    """No worker runs. Ids are shown whole, the histogram has a scale, and no internal name."""
    app.send_task("note", countdown=1)
    page = DelaysPage(chrome, flower)
    page.wait(lambda: page.text("#delays-overdue") == "1")
    assert page.attribute("#delays-next", "title") == "2030-06-30T22:30:00.000Z"
    page.wait(lambda: "message(s) overdue, the first for" in page.text("#delays-problems"))
    assert "start an installed worker" in page.text("#delays-problems small")
    assert page.find("#delays-problems").is_displayed()
    page.search(UUID)
    page.lists(1)
    assert page.text("tbody .delays-id code") == UUID
    cut = "return arguments[0].scrollWidth > arguments[0].clientWidth"
    assert not chrome.execute_script(cut, page.find("tbody .delays-id code"))
    most = max(count for *_, count in flower.json("/delays/summary")["histogram"])
    scale = [
        int(each.text)
        for each in chrome.find_elements(By.CSS_SELECTOR, "#delays-scale :not(:empty)")
    ]
    assert scale[0] >= most > scale[-1] == 0
    assert "celery_delay" not in page.text("#delays-page > :not(ul)")
    delay.cancel_all(delay.ids())


def test_control_characters_are_escaped(
    app: Celery, delay: Delay, chrome: Chrome, flower: FlowerProcess
) -> None:
    """In names, ids, arguments and queues, at every place of the page."""
    delay.cancel_all(delay.ids())
    app.send_task(f"n{HOSTILE}", (HOSTILE, "שלום"), task_id=f"i{HOSTILE}", countdown=9000)
    page = DelaysPage(chrome, flower)
    page.lists(1)
    for css in ("tbody .delays-name", "tbody .delays-id", "tbody .delays-args"):
        assert SHOWN in page.text(css), css
    assert "שלום" in page.text("tbody .delays-args")
    assert page.find("tbody .delays-args bdi")
    assert raw_in(chrome, "document.querySelector('#delays-page')") == []
    page.choose("tbody", "[data-one=cancel]")
    page.question()
    assert page.text("#delays-chosen").count(SHOWN) == 2
    assert raw_in(chrome, "document.querySelector('#delays-dialog')") == []
    page.confirm()
    page.told("1 task cancelled")


def test_the_key_of_a_task_is_shown_and_searched(
    app: Celery, delay: Delay, chrome: Chrome, flower: FlowerProcess
) -> None:
    delay.debounce(app.signature("note"), key=f"user:7{HOSTILE}", seconds=9000)
    page = DelaysPage(chrome, flower)
    page.search("key:user:7")
    page.lists(1)
    assert page.text("tbody .delays-name small") == f"debounce user:7{SHOWN}"
    assert raw_in(chrome, "document.querySelector('#delays-page')") == []
    page.search("name:note")
    page.lists(TASKS * 2 // 3 + 1)


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


def raw_in(chrome: Chrome, element: str) -> list[str]:
    """Texts and titles below *element* that contain a control character."""
    found: list[str] = chrome.execute_script(
        rf"""
        var texts = [],
            obeyed = /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/;
        {element}.querySelectorAll("*").forEach(function (each) {{
            texts.push(each.textContent);
            Array.from(each.attributes).forEach(function (one) {{ texts.push(one.value); }});
        }});
        return texts.filter(function (text) {{ return obeyed.test(text); }});
        """
    )
    return found
