"""django-celery-beat's entries wait in the broker: its tables are read, and its counts written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import time

import pytest

from celery_native_delay.testing import PrivateRedis
from tests.acceptance.worker import REPOSITORY
from tests.waiting import PATIENCE_SECONDS, wait_until

PROJECT = """
import os, time, django
from celery import Celery
from django.conf import settings
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "site.db"}},
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
        self._env = {
            **os.environ,
            "BROKER": broker,
            "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}",
        }
        (folder / "site_app.py").write_text(PROJECT)
        self.run("from django.core.management import call_command; call_command('migrate', '-v0')")

    def run(self, code: str) -> str:
        """Run *code* in a process of the site; what it prints."""
        begin = (
            "from site_app import app; from datetime import timedelta; "
            "from django.utils.timezone import now; "
            "from django_celery_beat.models import *\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", begin + code],
            cwd=self.folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def worker(self) -> subprocess.Popen[bytes]:
        with (self.folder / "worker.log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "site_app", "worker", "-c1", "-lINFO"],
                cwd=self.folder,
                env=self._env,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def ran(self, word: str) -> list[float]:
        """When the task ran with this argument."""
        path = self.folder / "ran.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return [float(line.split()[0]) for line in lines if line.endswith(f" {word}")]

    def wait_for(self, word: str, count: int) -> None:
        def ran() -> bool:
            return len(self.ran(word)) >= count

        try:
            wait_until(ran)
        except BaseException as exc:
            exc.add_note((self.folder / "worker.log").read_text()[-3000:])
            raise


@pytest.fixture
def site(tmp_path: Path, store_redis: PrivateRedis) -> Iterator[Site]:
    pytest.importorskip("django_celery_beat")
    site = Site(tmp_path, store_redis.url)
    worker = site.worker()
    yield site
    worker.terminate()
    worker.wait(PATIENCE_SECONDS)


SECOND = "IntervalSchedule.objects.get_or_create(every=1, period='seconds')[0]"


def entry(word: str, **fields: str) -> str:
    more = "".join(f", {name}={value}" for name, value in fields.items())
    return (
        f"PeriodicTask.objects.create(name='{word}', task='site.note', args='[\"{word}\"]', "
        f"interval={SECOND}{more})"
    )


def test_an_entry_that_another_process_makes_runs_and_is_counted(site: Site) -> None:
    site.run(entry("tick"))
    site.wait_for("tick", 3)

    def is_counted() -> bool:
        told = site.run(
            "p = PeriodicTask.objects.get(name='tick'); "
            "print(p.total_run_count, p.last_run_at is not None)"
        )
        return int(told.split()[0]) >= 3 and told.endswith("True")

    wait_until(is_counted)


def test_entries_are_imported_from_its_tables(site: Site) -> None:
    """An app that reads no tables any more takes them over once; what cannot be says why."""
    site.run(
        entry("tick")
        + ";"
        + entry("off", enabled="False")
        + "; PeriodicTask.objects.create(name='once', task='site.note', one_off=True, "
        "clocked=ClockedSchedule.objects.create(clocked_time=now() + timedelta(days=1)))"
    )
    told = site.run(
        "app.main = 'other'; app.conf.beat_scheduler = 'celery.beat:PersistentScheduler'\n"
        "from celery_native_delay import Delay\n"
        "from celery_native_delay.app.importing import imported\n"
        "schedules = Delay(app).schedules()\n"
        "for dry_run in (True, False, False):\n"
        "    found = imported(app, schedules, 'django-celery-beat', dry_run=dry_run)\n"
        "    print([each.name for each in found if each.problem is None])\n"
        "print(sorted((each.name, each.schedule, each.is_paused) for each in schedules))\n"
        "schedules.remove_all()"
    )
    assert told.splitlines() == [
        "['off', 'tick']",
        "['off', 'tick']",
        "[]",
        "[('off', 'every 1 s', True), ('tick', 'every 1 s', False)]",
    ]


def test_an_entry_that_is_switched_off_or_has_ended_runs_no_more(site: Site) -> None:
    site.run(entry("off") + ";" + entry("ends", expires="now() + timedelta(seconds=20)"))
    site.wait_for("off", 1)
    site.wait_for("ends", 1)
    site.run("p = PeriodicTask.objects.get(name='off'); p.enabled = False; p.save()")
    site.run(entry("later"))
    site.wait_for("later", 1)  # the change before it was taken up, too
    off, later = len(site.ran("off")), len(site.ran("later"))
    site.wait_for("later", later + 3)
    assert len(site.ran("off")) == off


ARMED_AGAIN = {
    "enabled": "p.enabled = True; p.save()",
    "reset": (
        "PeriodicTask.objects.update(enabled=True, last_run_at=None, total_run_count=0); "
        "PeriodicTasks.update_changed()"
    ),
    "made anew": f"p.delete(); {entry('once', one_off='True')}",
}


def test_a_one_off_entry_that_is_armed_again_runs_again_however_soon(
    tmp_path: Path, store_redis: PrivateRedis
) -> None:
    """The workers have not yet looked at the table since the entry ran."""
    pytest.importorskip("django_celery_beat")
    site = Site(tmp_path, store_redis.url)
    began = (
        "from celery_native_delay.app.schedules import Schedules\n"
        "schedules = Schedules(app)\n"
        "def run():\n"
        "    state = schedules._known('once')\n"
        "    assert schedules.advance('once', state.number, state.id, redelivered=False) is None\n"
        "    schedules.publish()\n"
        "    assert schedules._known('once').due_us is None, 'twice, as its run is not noted'\n"
        "    schedules.note_run('once')\n"
        "    assert not PeriodicTask.objects.get(name='once').enabled\n"
        f"{entry('once', one_off='True')}\n"
        "schedules.publish()\n"
        "run()\n"
    )
    again = "".join(
        f"p = PeriodicTask.objects.get(name='once')\n{each}\nschedules.publish()\nrun()\n"
        for each in ARMED_AGAIN.values()
    )
    assert site.run(f"{began}{again}print(schedules._known('once').runs)") == "4"


def test_the_note_of_a_run_writes_no_column_that_an_admin_may_change(site: Site) -> None:
    """``ModelEntry.save`` of django-celery-beat would write ``enabled`` as read before."""
    site.run(entry("tick"))
    site.wait_for("tick", 1)
    wrote = site.run(
        "from django.db import connection\n"
        "from django.test.utils import CaptureQueriesContext\n"
        "from celery_native_delay.app.schedules import Schedules\n"
        "schedules = Schedules(app)\n"
        "schedules._read_entries()\n"
        "with CaptureQueriesContext(connection) as asked:\n"
        "    schedules.note_run('tick')\n"
        "print(*[each['sql'] for each in asked if each['sql'].startswith('UPDATE')])"
    )
    assert wrote.count("UPDATE") == 1
    assert "total_run_count" in wrote
    assert "last_run_at" in wrote
    assert "enabled" not in wrote


def test_an_entry_starts_at_its_time_and_a_one_off_entry_runs_once(site: Site) -> None:
    start = time() + 8
    site.run(
        entry("starts", start_time="now() + timedelta(seconds=8)")
        + ";"
        + entry("once", one_off="True")
        + ";"
        + entry("tick")
    )
    site.wait_for("starts", 1)
    assert site.ran("starts")[0] >= start - 1
    site.wait_for("tick", len(site.ran("tick")) + 3)
    assert len(site.ran("once")) == 1
    wait_until(lambda: site.run("print(PeriodicTask.objects.get(name='once').enabled)") == "False")


def clocked(word: str, seconds: int) -> str:
    return (
        f"PeriodicTask.objects.create(name='{word}', task='site.note', args='[\"{word}\"]', "
        f"one_off=True, clocked=ClockedSchedule.objects.create("
        f"clocked_time=now() + timedelta(seconds={seconds})))"
    )


def test_a_clocked_entry_runs_once_though_it_was_moved_or_read_too_late(site: Site) -> None:
    site.run(clocked("passed", -1) + ";" + clocked("moved", 3600) + ";" + entry("tick"))
    site.wait_for("passed", 1)
    site.run("c = PeriodicTask.objects.get(name='moved').clocked; c.clocked_time = now(); c.save()")
    site.wait_for("moved", 1)
    enabled = "print(PeriodicTask.objects.filter(one_off=True, enabled=True).count())"
    wait_until(lambda: site.run(enabled) == "0")
    site.wait_for("tick", len(site.ran("tick")) + 3)
    assert (len(site.ran("passed")), len(site.ran("moved"))) == (1, 1)
