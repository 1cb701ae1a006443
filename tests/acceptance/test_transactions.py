"""Tasks with their effects in one transaction: once, whoever is killed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from pytest_celery_native_delay import installed
from tests.brokers import installed_rabbitmq
from tests.documents import ROOT
from tests.integration.test_transactions import django_settings
from tests.postgresql import find_postgresql, private_postgresql
from tests.processes import output_of, running
from tests.waiting import PATIENCE_SECONDS, wait_until

pytest.importorskip("django")

#: Where a worker's process dies, once for each task that has such a file.
STEPS = ("before", "written", "sent", "committed", "published")

#: ``NATIVE_DELAY_TEST_TASKS=2000`` for the drill.
TASKS = int(os.environ.get("NATIVE_DELAY_TEST_TASKS", "50"))


@pytest.fixture(scope="module")
def database_url() -> Iterator[str]:
    installed(find_postgresql)
    with private_postgresql() as postgresql:
        yield postgresql.new_database()


@pytest.fixture(params=["rabbitmq", "redis"])
def broker_url(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        return request.getfixturevalue("store_redis").url
    return request.getfixturevalue("running_rabbitmq")(installed_rabbitmq()).new_vhost()


class Shop:
    """The project of ``django_shop.py`` as processes, and its database."""

    def __init__(self, database_url: str, broker_url: str, folder: Path) -> None:
        self.folder = folder
        self.engine = create_engine(database_url)
        self._environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SHOP_DATABASE": json.dumps(django_settings(database_url)),
            "SHOP_BROKER": broker_url,
            "SHOP_FOLDER": str(folder),
        }
        self.run("from django.core.management import call_command as call; call('migrate')")
        with self.engine.begin() as connection:
            for table in ("effects", "mails"):
                connection.execute(text(f"DROP TABLE IF EXISTS {table}"))
                connection.execute(text(f"CREATE TABLE {table} (number integer)"))
            connection.execute(text("DELETE FROM native_delay_task"))
            connection.execute(text("DELETE FROM native_delay_record"))

    def run(self, code: str) -> str:
        """Run Python code that may use the project's module ``shop``."""
        code = f"from tests.acceptance.apps import django_shop as shop\n{code}"
        return output_of(sys.executable, "-c", code, cwd=self.folder, env=self._environ)

    def worker(self) -> AbstractContextManager[object]:
        app = ("-m", "celery", "-A", "tests.acceptance.apps.django_shop")
        command = (sys.executable, *app, "worker", "--concurrency=4", "--loglevel=INFO")
        log = self.folder / "worker.log"
        return running(*command, log=log, cwd=self.folder, env=self._environ)

    def rows(self, table: str, column: str = "number") -> list[int]:
        with self.engine.connect() as connection:
            return sorted(connection.execute(text(f"SELECT {column} FROM {table}")).scalars())


@pytest.fixture
def shop(database_url: str, broker_url: str, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(database_url, broker_url, tmp_path)
    yield shop
    shop.engine.dispose()


@pytest.mark.ci
@pytest.mark.redis
@pytest.mark.rabbitmq
@pytest.mark.timeout(600)
def test_effects_happen_once_and_sends_happen_once_wherever_a_worker_is_killed(shop: Shop) -> None:
    for number in range(0, TASKS, 10):
        step = STEPS[number // 10 % len(STEPS)]
        (shop.folder / f"{number}.{step}").touch()
    shop.run(f"[shop.charge.apply_async((n,), countdown=1) for n in range({TASKS})]")
    shop.run("shop.flaky.delay(1_000_000)")  # its first two runs are rolled back, and tried again
    with shop.worker():
        patience_seconds = PATIENCE_SECONDS * 2 + TASKS / 5
        wait_until(lambda: len(shop.rows("mails")) > TASKS, timeout_seconds=patience_seconds)
        wait_until(lambda: shop.rows("native_delay_task", "1") == [])
        assert list(shop.folder.glob("*.*[a-z]d")) == []  # each of them was killed
    assert shop.rows("effects") == [*range(TASKS), 1_000_000]
    assert shop.rows("mails") == [*range(TASKS), 1_000_000]
