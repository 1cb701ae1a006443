"""Draw the pictures of Flower in docs/ again: ``.venv/bin/python -m scripts.flower_pictures``.

A private Redis holds the tasks. Install it, and Chromium, with ``scripts/setup_brokers.sh`` and
``scripts/setup_browser.sh``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from celery import shared_task
from celery.schedules import crontab
from celery.signals import worker_init

from celery_native_delay import Delay, Rate
from celery_native_delay.bulk import bulk
from celery_native_delay.rates.line import Asked, Line
from celery_native_delay.testing import private_redis
from tests.acceptance.flower import (
    DelaysPage,
    FlowerProcess,
    RatesPage,
    SchedulesPage,
    browser,
    flowers_on,
)
from tests.acceptance.worker import Fleet, fleet_on
from tests.lines import lines_of
from tests.waiting import wait_until

DOCS = Path(__file__).resolve().parent.parent / "docs"

#: Pixels, with the browser's own bars.
HEIGHT = 1150

TASKS = 4200

CALLS = Rate("100/m", burst=10)
RATES = {"shop.call_api": {"limit": CALLS.limit, "burst": CALLS.burst}, "shop.send_sms": "5/s"}

ENTRIES: dict[str, Any] = {
    "import-catalogue": {"task": "shop.import_catalogue", "schedule": 600.0},
    "ping": {"task": "shop.ping", "schedule": 10.0},
    "refresh-prices": {"task": "shop.refresh_prices", "schedule": 15.0},
    "sync-orders": {"task": "shop.sync_orders", "schedule": 20.0},
    "invoices": {"task": "shop.send_invoices", "schedule": crontab(0, 7, day_of_month=1)},
    "newsletter": {"task": "shop.send_newsletter", "schedule": crontab(0, 9, day_of_week="mon")},
    "nightly": {"task": "shop.report", "schedule": crontab(30, 2)},
}

#: Keys of a rate limit, with the numbers of tasks that start or wait.
LINES = {"acme": 247, "globex": 128, "initech": 119, "umbrella": 55, "stark": 4, "hooli": 9}


@worker_init.connect  # type: ignore[untyped-decorator]
def schedule_entries(sender: Any, **_: Any) -> None:
    """Give a worker that imports this module its schedule entries."""
    sender.app.conf.beat_schedule = ENTRIES


@shared_task(name="shop.ping")  # type: ignore[untyped-decorator]
def run() -> None:
    """Do nothing."""


for entry in ("import_catalogue", "refresh_prices", "sync_orders", "report"):
    shared_task(name=f"shop.{entry}")(run.run)


def send_orders(app: Any) -> None:
    """Send reminders and e-mails for two busy times of the next day."""
    chance = random.Random(7)
    now = datetime.now(UTC)
    with bulk(app) as batch:
        for number in range(TASKS):
            busy = chance.choice([6, 6, 12])
            hours = min(max(chance.gauss(busy, 2), 0.1 + chance.random()), 23)
            name, args = chance.choice(
                [
                    ("shop.remind", (number,)),
                    ("shop.send_email", (f"{chance.choice(NAMES)}@example.org", f"Order {number}")),
                ]
            )
            batch.send(name, args, eta=now + timedelta(hours=hours), queue="default")


NAMES = ("ada", "guido", "linus")


@contextmanager
def shop(url: str, **conf: Any) -> Iterator[tuple[Fleet, FlowerProcess]]:
    """A worker and Flower, with the configuration *conf*."""
    with TemporaryDirectory() as folder, fleet_on(url, Path(folder), **conf) as fleet:
        fleet.worker(pool="solo")
        with flowers_on(fleet) as flowers:
            yield fleet, flowers.start(FLOWER_UNAUTHENTICATED_API="true")


def draw(page: DelaysPage, name: str) -> None:
    page.chrome.execute_script("scrollTo(0, 0)")
    page.chrome.save_screenshot(str(DOCS / f"flower-{name}.png"))


def draw_delays() -> None:
    with private_redis() as redis, shop(redis.url) as (fleet, flower):
        send_orders(fleet.app())
        with browser(height=HEIGHT) as chrome:
            page = DelaysPage(chrome, flower)
            page.lists(TASKS)
            page.wait(lambda: page.text("#delays-waiting") == f"{TASKS:,}")
            draw(page, "delays")
        with browser(height=HEIGHT, dark=True) as chrome:
            page = DelaysPage(chrome, flower)
            page.lists(TASKS)
            page.click(".delays-bar:nth-child(6)")
            page.wait(lambda: page.text("#delays-filter-text"))
            page.wait(lambda: f" of {TASKS:,} " not in page.text(".dataTables_info"))
            page.click("#delays-page-box")
            page.click("#delays-all")
            page.wait(lambda: int(page.text("#delays-selected").split()[0]) > 15)
            page.click("[data-change=reschedule]")
            page.question()
            page.wait(lambda: page.focus("id") == "delays-at")
            draw(page, "reschedule")


def fill_lines(app: Any) -> None:
    """Let tasks of the rate limits start and wait; one of initech's has raised RetryAfter."""
    with lines_of(app) as lines:
        for key, count in LINES.items():
            for _ in range(count):
                lines.ask([Asked("shop.call_api", key, CALLS)])
        held = partial(Line.hold, wait_us=90_000_000)
        lines.change(Asked("shop.call_api", "initech", CALLS), held)
        for _ in range(207):
            lines.ask([Asked("shop.send_sms", None, Rate("5/s"))])


def draw_rates_and_schedules() -> None:
    conf = {
        "native_delay_rates": RATES,
        "native_delay_schedules": True,
        "imports": ["scripts.flower_pictures"],
    }
    with (
        private_redis() as redis,
        shop(redis.url, **conf) as (fleet, flower),
        browser(height=HEIGHT) as chrome,
    ):
        app = fleet.app()
        delay = Delay(app)
        wait_until(lambda: len(list(delay.schedules())) == len(ENTRIES))
        delay.schedules().pause("import-catalogue")
        fill_lines(app)
        rates = RatesPage(chrome, flower)
        rates.lists(len(LINES) + 1)
        draw(rates, "rates")
        entries = SchedulesPage(chrome, flower)
        entries.lists(len(ENTRIES))
        entries.wait(lambda: int(entries.row("sync-orders")[5]) > 2)
        draw(entries, "schedules")


if __name__ == "__main__":
    draw_delays()
    draw_rates_and_schedules()
