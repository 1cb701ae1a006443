"""One local Spark for all tests of a session, and apps that its executors can import."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_celery_native_delay import IN_CI

#: What keeps a test's app small: few and short delay levels, as in tests.integration.traffic.
LEVELS = {"namespace": "tests", "levels": 12, "resolution": 0.02}

APP = """
from celery import Celery
from celery_native_delay import install
from kombu import Queue

app = Celery({name!r}, broker={url!r}, set_as_current=False)
app.conf.update(task_queues=[Queue("plain"), Queue("vip")], task_default_queue="plain",
                task_ignore_result=True)
install(app, **{settings!r})

@app.task(name="shop.remind", shared=False)
def remind(number=0, text="", extra=None):
    pass
"""


_UNRAISABLE = pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")

_TIMEZONE = "Pacific/Chatham"
"""The time zone of the executors: +12:45 or +13:45, which is easily told from UTC."""


def driver_environ(apps_folder: Path) -> dict[str, str]:
    """The environment of a driver in a process of its own, which can import the tests' apps."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(apps_folder)]),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JAVA_TOOL_OPTIONS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, and skip them if Spark or Java is missing."""
    here = Path(__file__).parent
    missing = _missing()
    if missing and IN_CI:
        raise pytest.UsageError(missing)
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.spark)
            # py4j before Spark 4.3 leaves sockets to the garbage collector.
            item.add_marker(pytest.mark.filterwarnings("ignore:.*socket.socket:ResourceWarning"))
            item.add_marker(_UNRAISABLE)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


def _missing() -> str:
    if not importlib.util.find_spec("pyspark") or not importlib.util.find_spec("pyarrow"):
        return "pyspark is not installed: pip install 'celery_native_delay[spark]'"
    if not shutil.which("java") and not os.environ.get("JAVA_HOME"):
        return "Java is not installed: run scripts/setup_spark.sh"
    return ""


@pytest.fixture(scope="session")
def apps_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the executors' Python path."""
    return tmp_path_factory.mktemp("apps")


@pytest.fixture(scope="session")
def spark(apps_folder: Path) -> Iterator[Any]:
    """A Spark with two slots and four attempts per task; its executors have an odd time zone."""
    from pyspark.sql import SparkSession

    root = str(Path(__file__).parents[2])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        environment.setenv("PYSPARK_PYTHON", sys.executable)
        environment.setenv("PYTHONPATH", os.pathsep.join([root, str(apps_folder)]))
        environment.setenv("TZ", _TIMEZONE)
        java_options = f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Duser.timezone={_TIMEZONE}"
        settings = {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.extraJavaOptions": java_options,
            "spark.driver.memory": "512m",
            "spark.sql.catalogImplementation": "in-memory",
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.adaptive.enabled": "false",
            "spark.sql.session.timeZone": "America/New_York",
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.warehouse.dir": str(apps_folder / "warehouse"),
            "spark.ui.enabled": "false",
        }
        builder = SparkSession.builder.master("local[2,4]").appName("tests")
        for name, value in settings.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
    time.tzset()  # else this process keeps the odd time zone, and later tests misread logs
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def make_app(apps_folder: Path) -> Callable[..., str]:
    """A function that writes an app for a broker and returns its import path."""

    def make(url: str, **settings: Any) -> str:
        name = f"shop_{next(_numbers)}"
        source = APP.format(name=name, url=url, settings=LEVELS | settings)
        (apps_folder / f"{name}.py").write_text(source)
        return f"{name}:app"

    return make


_numbers = itertools.count()
