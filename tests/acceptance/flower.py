"""Start Flower in a process, and open its pages in a headless browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from pytest_celery_native_delay import IN_CI
from tests.acceptance.worker import REPOSITORY, Fleet
from tests.waiting import PATIENCE_SECONDS, wait_until


@dataclass
class FlowerProcess:
    """A running Flower process. *user* is ``name:password``, sent with each request."""

    prefix: str
    process: subprocess.Popen[bytes]
    log_file: Path
    user: str = ""

    @cached_property
    def url(self) -> str:
        """The URL of Flower, as soon as Flower has chosen a port and answers there."""

        def address() -> str | None:
            log = self.log_file.read_text(errors="replace")
            assert self.process.poll() is None, log
            found = re.search(r"Visit me at (http://127\.0\.0\.1:\d+)", log)
            return found[1] if found else None

        address.__qualname__ = "Flower's address"
        found = wait_until(address)
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

    def stop(self) -> None:
        """End Flower with a signal, as an administrator does."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(PATIENCE_SECONDS)


@dataclass
class Flowers:
    """Starts the Flower processes of one test, on one broker."""

    fleet: Fleet
    started: list[FlowerProcess] = field(default_factory=list)

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
        """Start ``celery delay flower`` on a free port; it ends with the test."""
        options += (f"--basic-auth={user}",) if user else ()
        options += (f"--url-prefix={prefix}",) if prefix else ()
        log_file = self.fleet.folder / f"flower-{len(self.started)}.log"
        with log_file.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "celery", "-A", "tests.acceptance.apps.installed"),
                    *(*command, "--port=0", "--address=127.0.0.1", *options),
                ],
                cwd=REPOSITORY,
                env=self.fleet.environment(**(conf or {})) | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        flower = FlowerProcess(prefix, process, log_file, user)
        self.started.append(flower)
        return flower.ready() if wait else flower

    def close(self) -> None:
        for flower in self.started:
            flower.stop()
            sys.stdout.write(f"---- log of Flower ----\n{flower.log_file.read_text()}\n")


def chromium() -> tuple[str, str]:
    """Paths of the system's Chromium and its driver. If one is missing, skip; in CI fail."""
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if all(found):
        return str(found[0]), str(found[1])
    missing = "no Chromium with its driver: run scripts/setup_browser.sh"
    if IN_CI:
        pytest.fail(missing, pytrace=False)
    pytest.skip(missing)


@contextmanager
def browser(*, width: int = 1280, height: int = 1000, dark: bool = False) -> Iterator[Chrome]:
    """A headless Chromium."""
    binary, driver = chromium()
    options = ChromeOptions()
    options.binary_location = binary
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

    path_of_page = "/delays"

    def __init__(self, chrome: Chrome, flower: FlowerProcess, asked: str | None = "") -> None:
        """Open the page; with None it is open already."""
        self.chrome = chrome
        if asked is not None:
            chrome.get(flower.page(self.path_of_page + asked))

    def find(self, css: str) -> WebElement:
        return self.chrome.find_element(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        # Not .text, which is empty for elements outside the visible area.
        found: str = self.chrome.execute_script(
            "var found = document.querySelector(arguments[0]);"
            "return found ? found.textContent.trim() : ''",
            css,
        )
        return found

    def attribute(self, css: str, name: str) -> str:
        """An attribute of the first element, read in one step: the page may be redrawn any time."""
        found: str = self.chrome.execute_script(
            "var found = document.querySelector(arguments[0]);"
            "return found && found.getAttribute(arguments[1]) || ''",
            css,
            name,
        )
        return found

    def click(self, css: str) -> None:
        """Click an element; try again if the page is redrawn at that moment."""

        def clicked() -> bool:
            try:
                self.chrome.execute_script(
                    "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})",
                    self.find(css),
                )
                self.find(css).click()
            except Exception as exc:
                self.last_error = exc
                return False
            return True

        wait_until(clicked)

    def choose(self, row: str, item: str) -> None:
        """Open the menu of a row and click *item*; try again if a redrawn table closed the menu."""

        def chosen() -> bool:
            try:
                if not self.find(f"{row} {item}").is_displayed():
                    self.find(f"{row} [data-bs-toggle=dropdown]").click()
                self.find(f"{row} {item}").click()
            except Exception as exc:
                self.last_error = exc
                return False
            return True

        wait_until(chosen)

    def wait(self, condition: Callable[[], Any]) -> None:
        wait_until(lambda: bool(condition()))

    def lists(self, count: int) -> None:
        """Wait until the table says how many tasks match."""
        try:
            self.wait(lambda: f" of {count:,} " in self.text(".dataTables_info"))
        except BaseException as exc:
            for css in (".dataTables_info", ".dataTables_filter input", "#toast-container"):
                exc.add_note(f"{css}: {self.text(css)!r} {self.find(css).get_attribute('value')!r}")
            raise

    def focus(self, attribute: str) -> str | None:
        """An attribute of the focused element."""
        found: str | None = self.chrome.execute_script(
            "return document.activeElement.getAttribute(arguments[0])", attribute
        )
        return found

    def search(self, text: str) -> None:
        """Type *text* into the search box; try again if a dialog took the focus meanwhile."""

        def typed() -> bool:
            box = self.find("#delays-table_filter input")
            box.clear()
            box.send_keys(text or " ")
            return box.get_attribute("value") == (text or " ")

        wait_until(typed)

    def confirm(self) -> None:
        """Confirm the dialog, and wait until it is closed."""
        self.click("#delays-yes")
        self.wait(lambda: not self.dialog_is_open())

    def dialog_is_open(self, css: str = "#delays-dialog") -> bool:
        return bool(
            self.chrome.execute_script(
                "return document.querySelector(arguments[0]).classList.contains('show')", css
            )
        )

    def question(self) -> str:
        self.wait(self.dialog_is_open)
        return self.text("#delays-question")

    def told(self, sentence: str) -> None:
        """Wait until the page shows a message with this text."""
        self.wait(lambda: sentence in self.text("#toast-container"))

    def path(self) -> str:
        """The current address without scheme and host."""
        found: str = self.chrome.execute_script("return location.pathname + location.search")
        return found

    def complaints(self) -> list[str]:
        """Errors in the browser's console."""
        return [entry["message"] for entry in self.chrome.get_log("browser")]


class RatesPage(DelaysPage):
    """The page Rates."""

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


class RunsPage(DelaysPage):
    """The page Runs."""

    path_of_page = "/delays/runs"

    def row(self, css: str) -> list[str]:
        """The cell texts of a run, without its buttons; Began is left out."""
        found: list[str] = self.chrome.execute_script(
            "const row = document.querySelector(arguments[0]);"
            "return row ? [...row.cells].map((cell) => cell.textContent.trim()) : []",
            css,
        )
        return found[:2] + found[3:9]

    def dialog_is_open(self, css: str = "#runs-dialog") -> bool:
        return super().dialog_is_open(css)


class SchedulesPage(DelaysPage):
    """The page Schedules."""

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


@contextmanager
def flowers_on(fleet: Fleet) -> Iterator[Flowers]:
    flowers = Flowers(fleet)
    try:
        yield flowers
    finally:
        flowers.close()
