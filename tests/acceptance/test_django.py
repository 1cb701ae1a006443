"""The project of the Django guide, made and tested as the guide shows it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

from tests.documents import ROOT, only

django = pytest.importorskip("django")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the guide's project."""
    folder = tmp_path_factory.mktemp("made")
    follow(folder, "django-start")
    for path, example in {
        "shop/celery.py": only("django"),
        "shop/__init__.py": only("django-init"),
        "shop/urls.py": only("django-urls"),
        "orders/models.py": only("django-models"),
        "orders/tasks.py": only("django-tasks"),
        "orders/views.py": only("django-views"),
        "orders/tests.py": only("django-tests"),
    }.items():
        (folder / path).write_text(example.text)
    add(folder / "shop/settings.py", only("django-settings").text)
    if django.VERSION < (6, 1):
        add(folder / "shop/settings.py", only("django-mails").text)
    follow(folder, "django-migrate")
    return folder


@pytest.fixture
def site(made: Path, tmp_path: Path) -> Path:
    """A copy of the guide's project, which a test may change."""
    return shutil.copytree(made, tmp_path / "site")


def follow(folder: Path, name: str) -> None:
    """Run the commands of an example; `python` is this Python."""
    for line in only(name).text.splitlines():
        manage(folder, *shlex.split(line.removeprefix("$ python ")))


def manage(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-Werror", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def add(path: Path, text: str) -> None:
    path.write_text(path.read_text() + "\n" + text)


def test_the_guide_works_as_shown(site: Path) -> None:
    """Its tests pass without a broker; its settings have Celery's prefix."""
    assert "Ran 4 tests" in manage(site, "manage.py", "test")
    asked = (
        "from shop.celery import app; from celery_native_delay.app.install import installation_of; "
        "print('namespace', installation_of(app).settings().namespace)"
    )
    assert "namespace shop_delay\n" in manage(site, "manage.py", "shell", "-c", asked)


def test_tasks_are_sent_with_the_transaction_as_shown(site: Path) -> None:
    """On SQLite; the transaction of the guide commits once, and is rolled back once."""
    add(site / "shop/settings.py", only("django-transactions-settings").text)
    (site / "orders/test_transactions.py").write_text(only("transactions-tests").text)
    assert "Ran 5 tests" in manage(site, "manage.py", "test")
    manage(site, "manage.py", "migrate")
    servers = 'CELERY_BROKER_URL = "memory://"\nCELERY_RESULT_BACKEND = None\n'
    add(site / "shop/settings.py", servers)
    example = only("transactions-django").text
    program = f"""
from celery_native_delay import Delay
from django.db import transaction
from orders.models import Order
from orders.tasks import confirm, remind
from shop.celery import app

try:
    with transaction.atomic():
{indent(example, " " * 8)}
        raise ZeroDivisionError
except ZeroDivisionError:
    print("rolled back:", Order.objects.count(), Delay(app).count())
{example}
print("committed:", Order.objects.count(), Delay(app).count())
"""
    told = manage(site, "manage.py", "shell", "-c", program)
    assert "rolled back: 0 0\ncommitted: 1 1\n" in told


BEAT_TESTS = """\
# orders/test_schedules.py
from celery_native_delay.clock import Clock
from django.core import mail
from django.test import TestCase
from django_celery_beat.models import CrontabSchedule, PeriodicTask

from shop.celery import app


class ScheduleTest(TestCase):
    def test_the_count_is_sent_each_night(self):
        nightly = CrontabSchedule.objects.create(minute="30", hour="2")
        PeriodicTask.objects.create(
            name="count", task="orders.tasks.confirm", args='["ada@example.com"]', crontab=nightly
        )
        with Clock(app) as clock:
            clock.advance(days=3)
        self.assertEqual(len(mail.outbox), 3)
        self.assertEqual(PeriodicTask.objects.get(name="count").total_run_count, 3)
"""


@pytest.mark.skipif(django.VERSION >= (6, 1), reason="django-celery-beat 2.9 needs Django < 6.1")
def test_schedules_of_django_celery_beat_run_as_shown(site: Path) -> None:
    pytest.importorskip("django_celery_beat")
    add(site / "shop/settings.py", only("django-beat-settings").text)
    (site / "orders/test_schedules.py").write_text(BEAT_TESTS)
    assert "Ran 5 tests" in manage(site, "manage.py", "test")


DJANGO6_TESTS = """\
from celery_native_delay import Delay
from celery_native_delay.clock import Clock
from django.core import mail
from django.test import TestCase

from shop.celery import app

from .reviews import ask_in_a_week


class ReviewTest(TestCase):
    def setUp(self):
        self.clock = self.enterContext(Clock(app))

    def test_a_review_is_asked_for_after_a_week(self):
        ask_in_a_week("ada@example.com")
        self.clock.advance(days=6)
        self.assertEqual(mail.outbox, [])
        self.clock.advance(days=1)
        self.assertEqual(mail.outbox[0].subject, "How was your order?")

    def test_a_task_of_django_is_listed_and_cancelled(self):
        task_id = ask_in_a_week("ada@example.com").id
        (listed,) = Delay(app).ls("name:orders.reviews.ask_for_review")
        self.assertEqual(listed.id, task_id)
        self.assertTrue(Delay(app).cancel(task_id))
        self.clock.advance(days=7)
        self.assertEqual(mail.outbox, [])
"""


@pytest.mark.skipif(django.VERSION < (6,), reason="Django 6 has tasks, and needs Python 3.12")
def test_tasks_of_django_6_wait_as_shown(site: Path) -> None:
    pytest.importorskip("django_tasks_celery")
    add(site / "shop/settings.py", only("django6-settings").text)
    add(site / "orders/tasks.py", "from . import reviews\n")
    (site / "orders/reviews.py").write_text(only("django6-task").text)
    (site / "orders/test_reviews.py").write_text(DJANGO6_TESTS)
    assert "Ran 6 tests" in manage(site, "manage.py", "test")


@pytest.mark.skipif(django.VERSION < (6,), reason="Django 6 has tasks, and needs Python 3.12")
def test_tasks_of_django_6_are_sent_with_the_transaction(site: Path) -> None:
    pytest.importorskip("django_tasks_celery")
    for name in ("django6-settings", "django-transactions-settings"):
        add(site / "shop/settings.py", only(name).text)
    add(site / "orders/tasks.py", "from . import reviews\n")
    (site / "orders/reviews.py").write_text(only("django6-task").text)
    manage(site, "manage.py", "migrate")
    servers = 'CELERY_BROKER_URL = "memory://"\nCELERY_RESULT_BACKEND = None\n'
    add(site / "shop/settings.py", servers)
    program = """
from celery_native_delay import Delay
from django.db import transaction
from orders.reviews import ask_for_review, ask_in_a_week
from shop.celery import app

def queued():
    with app.connection_for_write() as connection:
        return connection.default_channel.queue_declare("celery").message_count

def ask():
    ask_in_a_week("ada@example.com")
    ask_for_review.enqueue("ada@example.com")

try:
    with transaction.atomic():
        ask()
        raise ZeroDivisionError
except ZeroDivisionError:
    print("rolled back:", Delay(app).count(), queued())
with transaction.atomic():
    ask()
print("committed:", Delay(app).count(), queued())
"""
    told = manage(site, "manage.py", "shell", "-c", program)
    assert "rolled back: 0 0\ncommitted: 1 1\n" in told
