"""Start Flower in a process, and open its pages in a headless browser."""

from __future__ import annotations

import json
import re
import shutil
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from selenium.common.exceptions import WebDriverException
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from celery_native_delay.testing import BrokerMissing
from pytest_celery_native_delay import installed
from tests.acceptance.worker import Fleet, Worker
from tests.waiting import PATIENCE_SECONDS, wait_until


@dataclass
class FlowerProcess:
    """A running Flower process. *user* is ``name:password``, sent with each request."""

    worker: Worker
    prefix: str = ""
    user: str = ""

    @cached_property
    def url(self) -> str:
        """The URL of Flower, as soon as Flower has chosen a port and answers there."""

        def address() -> re.Match[str] | None:
            assert self.worker.process.poll() is None, self.worker.log
            return re.search(r"Visit me at (http://127\.0\.0\.1:\d+)", self.worker.log)

        found = wait_until(address)[1]
        return f"{found}/{self.prefix}" if self.prefix else found

    def ready(self) -> FlowerProcess:
        """Wait until Flower answers; returns the process."""
        assert self.ask("/healthcheck")[0] == 200
        return self

    def ask(
        self, path: str, body: Any = None, *, user: str | None = None, **headers: str
    ) -> tuple[int, str]:
        """Send a request, a POST if there is a *body*; returns status and text of the answer."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if user or (user is None and self.user):
            sent["Authorization"] = "Basic " + b64encode((user or self.user).encode()).decode()
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            sent.setdefault("Content-Type", "application/json")
        try:
            with urlopen(Request(self.url + path, data, sent), timeout=PATIENCE_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()

    def json(self, path: str, body: Any = None, **more: Any) -> Any:
        """Send a request that must succeed; returns the JSON of the answer."""
        status, text = self.ask(path, body, **more)
        assert status == 200, (path, status, text)
        return json.loads(text)

    def page(self, path: str) -> str:
        """The URL of a page for a browser, with user and password."""
        return (self.url.replace("://", f"://{self.user}@") if self.user else self.url) + path


@dataclass
class Flowers:
    """Starts Flower on the broker of a fleet, with which it ends."""

    fleet: Fleet

    def start(
        self,
        *options: str,
        command: tuple[str, ...] = ("delay", "flower"),
        user: str = "",
        prefix: str = "",
        wait: bool = True,
        conf: dict[str, Any] | None = None,
        **environment: str,
    ) -> FlowerProcess:
        """Start ``celery delay flower`` on a free port."""
        options += (f"--basic-auth={user}",) if user else ()
        options += (f"--url-prefix={prefix}",) if prefix else ()
        words = (*command, "--port=0", "--address=127.0.0.1", *options)
        process = self.fleet.command(*words, environment=environment, **(conf or {}))
        flower = FlowerProcess(process, prefix, user)
        return flower.ready() if wait else flower


def chromium() -> list[str]:
    """Paths of the system's Chromium and its driver."""
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in found:
        raise BrokerMissing("no Chromium with its driver: run scripts/setup_browser.sh")
    return found


@contextmanager
def browser(*, width: int = 1280, height: int = 1000, dark: bool = False) -> Iterator[Chrome]:
    """A headless Chromium."""
    options = ChromeOptions()
    options.binary_location, driver = installed(chromium)
    options.add_argument("--headless=new")
    options.add_argument("--no-sandbox")  # root may not have one
    options.add_argument("--disable-dev-shm-usage")
    options.add_argument("--disable-gpu")
    options.add_argument(f"--window-size={width},{height}")
    if dark:
        options.add_argument("--force-dark-mode")
    chrome = Chrome(options, Service(driver))
    try:
        chrome.set_page_load_timeout(PATIENCE_SECONDS)
        yield chrome
    finally:
        chrome.quit()


class DelaysPage:
    """The page as a user sees it: methods click, type and read by visible text."""

    name = "delays"
    """How the ids of its elements begin."""

    def __init__(self, chrome: Chrome, flower: FlowerProcess, asked: str | None = "") -> None:
        """Open the page; with None it is open already."""
        self.chrome, self.flower = chrome, flower
        if asked is not None:
            self.open(asked)

    def open(self, asked: str = "") -> None:
        path = "/delays" if self.name == "delays" else f"/delays/{self.name}"
        self.chrome.get(self.flower.page(path + asked))

    def js(self, code: str, *arguments: Any) -> Any:
        return self.chrome.execute_script(code, *arguments)

    def find(self, css: str) -> WebElement:
        return self.chrome.find_element(By.CSS_SELECTOR, css)

    def found(self, css: str) -> list[WebElement]:
        return self.chrome.find_elements(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        # Not .text, which is empty for elements outside the visible area.
        found = "var found = document.querySelector(arguments[0]);"
        return self.js(f"{found} return found ? found.textContent.trim() : ''", css)

    def attribute(self, css: str, name: str) -> str:
        """An attribute of the first element, read in one step: the page may be redrawn any time."""
        found = "var found = document.querySelector(arguments[0]);"
        return self.js(f"{found} return found && found.getAttribute(arguments[1]) || ''", css, name)

    def row(self, css: str) -> list[str]:
        """The cell texts of a row of the table."""
        return next(iter(self.rows(css)), [])

    def rows(self, css: str = "tbody tr") -> list[list[str]]:
        """The cell texts of rows of the table."""
        return self.js(
            "return [...document.querySelectorAll(arguments[0])].map((row) => [...row.cells].map("
            "(cell) => cell.textContent.replace(/\\s+/g, ' ').trim()))",
            f"#{self.name}-table {css}",
        )

    def click(self, css: str) -> None:
        """Click an element."""
        center = "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})"
        self.until_done(lambda: (self.js(center, self.find(css)), self.find(css).click()))

    def choose(self, row: str, item: str) -> None:
        """Open the menu of a row and click *item*."""

        def choose() -> None:
            if not self.find(f"{row} {item}").is_displayed():
                self.find(f"{row} [data-bs-toggle=dropdown]").click()
            self.find(f"{row} {item}").click()

        self.until_done(choose)

    def until_done(self, act: Callable[[], object]) -> None:
        """Act; try again if the page is redrawn at that moment."""

        def done() -> bool:
            with suppress(WebDriverException):
                act()
                return True
            return False

        wait_until(done)

    def wait(self, condition: Callable[[], Any]) -> None:
        wait_until(lambda: bool(condition()))

    def lists(self, count: int) -> None:
        """Wait until the table says how many tasks match."""
        wait_until(
            lambda: f" of {count:,} " in self.text(".dataTables_info"),
            telling=lambda: [*map(self.text, (".dataTables_info", "#toast-container"))],
        )

    def focus(self, attribute: str) -> str | None:
        """An attribute of the focused element."""
        return self.js("return document.activeElement.getAttribute(arguments[0])", attribute)

    def search(self, text: str) -> None:
        """Type *text* into the search box; try again if a dialog took the focus meanwhile."""

        def typed() -> bool:
            box = self.find(f"#{self.name}-table_filter input")
            box.clear()
            box.send_keys(text or " ")
            return box.get_attribute("value") == (text or " ")

        wait_until(typed)

    def confirm(self) -> None:
        """Confirm the dialog, and wait until it is closed."""
        self.click(f"#{self.name}-yes")
        self.wait(lambda: not self.dialog_is_open())

    def dialog_is_open(self, css: str = "") -> bool:
        shown = "return document.querySelector(arguments[0]).classList.contains('show')"
        return bool(self.js(shown, css or f"#{self.name}-dialog"))

    def question(self) -> str:
        self.wait(self.dialog_is_open)
        return self.text(f"#{self.name}-question")

    def told(self, sentence: str) -> None:
        """Wait until the page shows a message with this text."""
        self.wait(lambda: sentence in self.text("#toast-container"))

    def path(self) -> str:
        """The current address without scheme and host."""
        return self.js("return location.pathname + location.search")

    def complaints(self) -> list[str]:
        """Errors in the browser's console."""
        return [entry["message"] for entry in self.chrome.get_log("browser")]


class RatesPage(DelaysPage):
    """The page Rates."""

    name = "rates"


class RunsPage(DelaysPage):
    """The page Runs."""

    name = "runs"


class SchedulesPage(DelaysPage):
    """The page Schedules."""

    name = "schedules"

    def row(self, name: str) -> list[str]:
        """The cell texts of an entry."""
        return super().row(f"tr[id='entry-{name}']")

    def press(self, name: str, verb: str, key: str = Keys.ENTER) -> None:
        """Press a button of an entry with the keyboard; try again if the press missed the button.

        The page may redraw the table in between, and then moves the focus to the new button.
        """
        css = f"tr[id='entry-{name}'] [data-change={verb}]"
        self.js(
            "window.pressed = false; document.addEventListener('click', (event) => {"
            "  if (event.target.closest(arguments[0])) window.pressed = true;"
            "}, true)",
            css,
        )

        def pressed() -> bool:
            focused = (
                "const found = document.querySelector(arguments[0]); if (found) found.focus();"
            )
            if self.js(f"{focused} return Boolean(found)", css):
                ActionChains(self.chrome).send_keys(key).perform()
            return self.js("return window.pressed")

        self.wait(pressed)


@contextmanager
def flowers_on(fleet: Fleet) -> Iterator[Flowers]:
    yield Flowers(fleet)
