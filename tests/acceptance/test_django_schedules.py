"""django-celery-beat's entries wait in the broker: its tables are read, and its counts written."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import time
from typing import Any

import pytest

from celery_native_delay.testing import PrivateRedis
from tests.documents import ROOT
from tests.processes import output_of, running
from tests.waiting import PATIENCE_SECONDS, wait_until

PROJECT = """
import os, time, django
from celery import Celery
from django.conf import settings
settings.configure(
    # SQLite ends a transaction at once that reads first and then meets another writer, and
    # django-celery-beat begins each save like that; as "IMMEDIATE" it waits for the other.
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "site.db",
                           "OPTIONS": {"timeout": 60, "transaction_mode": "IMMEDIATE"}}},
    INSTALLED_APPS=["django_celery_beat"],
    USE_TZ=True,
    TIME_ZONE="Europe/Berlin",
)
django.setup()
from celery_native_delay import install
app = Celery("site", broker=os.environ["BROKER"])
app.conf.timezone = "Europe/Berlin"
app.conf.beat_scheduler = "django"
app.conf.beat_max_loop_interval = 1
app.conf.result_expires = None
install(app, schedules=True)

@app.task(name="site.note")
def note(*args):
    with open("ran.txt", "a") as file:
        file.write(f"{time.time()} {' '.join(args)}\\n")
"""


class Site:
    """A Django project with django-celery-beat in a folder, and its worker."""

    def __init__(self, folder: Path, broker: str) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            "BROKER": broker,
            "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        }
        (folder / "site_app.py").write_text(PROJECT)
        self.run("from django.core.management import call_command as c; c('migrate', '-v0')")

    def run(self, code: str) -> str:
        """Run *code* in a process of the site; what it prints."""
        begin = (
            "from site_app import app; from datetime import timedelta; "
            "from django.utils.timezone import now; "
            "from django_celery_beat.models import *\n"
        )
        command = (sys.executable, "-c", begin + code)
        return output_of(*command, cwd=self.folder, env=self.env).strip()

    def asks(self, question: str) -> tuple[Any, ...]:
        """The first row of the answer of the site's database."""
        with closing(sqlite3.connect(self.folder / "site.db", timeout=PATIENCE_SECONDS)) as base:
            return tuple(base.execute(question).fetchone())

    def ran(self, word: str) -> list[float]:
        """When the task ran with this argument."""
        path = self.folder / "ran.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return [float(line.split()[0]) for line in lines if line.endswith(f" {word}")]

    def wait_for(self, word: str, count: int = 1) -> None:
        wait_until(lambda: len(self.ran(word)) >= count)


@pytest.fixture(scope="module")
def site(redis: PrivateRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site whose worker runs the entries of all tests, which have different names."""
    pytest.importorskip("django_celery_beat")
    site = Site(tmp_path_factory.mktemp("site"), redis.url)
    command = (sys.executable, "-m", "celery", "-A", "site_app", "worker", "-c1", "-lINFO")
    log = site.folder / "worker.log"
    with running(*command, log=log, cwd=site.folder, env=site.env):
        yield site
    sys.stdout.write(log.read_text())


@pytest.fixture
def quiet_site(store_redis: PrivateRedis, tmp_path: Path) -> Site:
    """A site without a worker."""
    pytest.importorskip("django_celery_beat")
    return Site(tmp_path, store_redis.url)


OF = "FROM django_celery_beat_periodictask WHERE name ="
SECOND = "IntervalSchedule.objects.get_or_create(every=1, period='seconds')[0]"


def entry(word: str, **fields: str) -> str:
    fields = {"interval": SECOND} | fields
    more = ", ".join(f"{name}={value}" for name, value in fields.items() if value)
    more += f", name='{word}', task='site.note', args='[\"{word}\"]'"
    return f"PeriodicTask.objects.create({more});"


def clocked(word: str, seconds: int) -> str:
    at = f"now() + timedelta(seconds={seconds})"
    return entry(
        word,
        interval="",
        one_off="True",
        clocked=f"ClockedSchedule.objects.create(clocked_time={at})",
    )


def test_an_entry_that_another_process_makes_runs_and_is_counted(site: Site) -> None:
    site.run(entry("tick"))
    site.wait_for("tick", 3)

    counted = f"SELECT total_run_count >= 3 AND last_run_at IS NOT NULL {OF} 'tick'"
    wait_until(lambda: site.asks(counted) == (True,))


def test_the_first_entry_of_all_is_noticed_at_the_next_look(quiet_site: Site) -> None:
    """django-celery-beat itself misses it for five minutes."""
    told = quiet_site.run(
        "from celery_native_delay.app.beat import scheduler_class\n"
        "scheduler = scheduler_class(app)(app=app, lazy=False)\n"
        "print(len(scheduler.schedule))\n" + entry("tick") + "\nprint(*scheduler.schedule)"
    )
    assert told.splitlines() == ["0", "tick"]


def test_entries_are_imported_from_its_tables(quiet_site: Site) -> None:
    """An app that reads no tables any more takes them over once; what cannot be says why."""
    told = quiet_site.run(
        entry("tick")
        + entry("off", enabled="False")
        + clocked("once", 86_400)
        + "\napp.main = 'other'; app.conf.beat_scheduler = 'celery.beat:PersistentScheduler'\n"
        "from celery_native_delay import Delay\n"
        "from celery_native_delay.app.importing import imported\n"
        "schedules = Delay(app).schedules()\n"
        "for dry_run in (True, False, False):\n"
        "    found = imported(app, schedules, 'django-celery-beat', dry_run=dry_run)\n"
        "    print([each.name for each in found if each.problem is None])\n"
        "print(sorted((each.name, each.schedule, each.is_paused) for each in schedules))"
    )
    assert told.splitlines() == [
        "['off', 'tick']",
        "['off', 'tick']",
        "[]",
        "[('off', 'every 1 s', True), ('tick', 'every 1 s', False)]",
    ]


def test_an_entry_that_is_switched_off_or_has_ended_runs_no_more(site: Site) -> None:
    site.run(entry("off") + entry("ends", expires="now() + timedelta(seconds=15)"))
    site.wait_for("off")
    site.wait_for("ends")
    site.run("p = PeriodicTask.objects.get(name='off'); p.enabled = False; p.save()")
    site.run(entry("later"))
    site.wait_for("later")  # the change before it was taken up, too
    off, later = len(site.ran("off")), len(site.ran("later"))
    site.wait_for("later", later + 3)
    assert len(site.ran("off")) == off


def test_a_one_off_entry_that_is_armed_again_runs_again_however_soon(quiet_site: Site) -> None:
    """The workers have not yet looked at the table since the entry ran."""
    once = entry("once", one_off="True")
    reset = "enabled=True, last_run_at=None, total_run_count=0"
    armed = (
        once,
        "p.enabled = True; p.save()",
        f"PeriodicTask.objects.update({reset}); PeriodicTasks.update_changed()",
        f"p.delete(); {once}",
    )
    program = """
from celery_native_delay.app.schedules import Schedules
schedules = Schedules(app)
for arm in %r:
    exec(arm)
    schedules.publish()
    state = schedules._known('once')
    assert schedules.advance('once', state.number, state.id, redelivered=False) is None
    schedules.publish()
    assert schedules._known('once').due_us is None, 'twice, as its run is not noted'
    schedules.note_run('once')
    p = PeriodicTask.objects.get(name='once')
    assert not p.enabled
print(schedules._known('once').runs)
"""
    assert quiet_site.run(program % (armed,)) == "4"


def test_the_note_of_a_run_writes_no_column_that_an_admin_may_change(site: Site) -> None:
    """``ModelEntry.save`` of django-celery-beat would write ``enabled`` as read before."""
    site.run(entry("noted"))
    site.wait_for("noted")
    wrote = site.run(
        "from django.db import connection\n"
        "from django.test.utils import CaptureQueriesContext\n"
        "from celery_native_delay.app.schedules import Schedules\n"
        "schedules = Schedules(app)\n"
        "schedules._read_entries()\n"
        "with CaptureQueriesContext(connection) as asked:\n"
        "    schedules.note_run('noted')\n"
        "print(*[each['sql'] for each in asked if each['sql'].startswith('UPDATE')])"
    )
    assert wrote.count("UPDATE") == 1
    assert "total_run_count" in wrote
    assert "last_run_at" in wrote
    assert "enabled" not in wrote


def test_an_entry_starts_at_its_time_and_a_one_off_entry_runs_once(site: Site) -> None:
    start = time() + 5
    site.run(
        entry("starts", start_time="now() + timedelta(seconds=5)")
        + entry("once", one_off="True")
        + entry("beside")
    )
    site.wait_for("starts")
    assert site.ran("starts")[0] >= start - 1
    site.wait_for("beside", len(site.ran("beside")) + 3)
    assert len(site.ran("once")) == 1
    wait_until(lambda: site.asks(f"SELECT enabled {OF} 'once'") == (False,))


def test_a_clocked_entry_runs_once_though_it_was_moved_or_read_too_late(site: Site) -> None:
    site.run(clocked("passed", -1) + clocked("moved", 3600) + entry("regular"))
    site.wait_for("passed")
    site.run("c = PeriodicTask.objects.get(name='moved').clocked; c.clocked_time = now(); c.save()")
    site.wait_for("moved")
    enabled = f"SELECT count(*) {OF} 'moved' AND enabled"
    wait_until(lambda: site.asks(enabled) == (0,))
    site.wait_for("regular", len(site.ran("regular")) + 3)
    assert (len(site.ran("passed")), len(site.ran("moved"))) == (1, 1)
