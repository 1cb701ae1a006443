"""Rows that Spark or its user sends again run once: lost executors, killed drivers, whole jobs.

Real workers run the tasks.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException

from celery_native_delay.spark import FanOut, FanOutResult, task_id_of
from tests.acceptance.worker import Fleet, fleet_on
from tests.brokers import in_ci
from tests.spark.conftest import LEVELS, driver_environ
from tests.waiting import PATIENCE_SECONDS, wait_until

ROOT = Path(__file__).parents[2]

ROWS = 100
LOST_AT = 40
"""The row of the first partition at which its executor is lost, after the rows before it."""

BATCHES, BATCH_ROWS, MARKED = 4, 100, 30
"""The batches of a stream, their rows, and the row at which the test learns of the batch."""

DROPPED = "it has run already, and it is once"

APP = """
import os, signal
from pathlib import Path
from celery_native_delay import install
from pyspark import TaskContext
from tests.acceptance.apps.tasks import new_app

class ExecutorLost(BaseException):
    pass

def header(number, lost_times=0):
    context = TaskContext.get()
    if context is not None and context.attemptNumber() < (lost_times or 0):
        raise ExecutorLost()
    if number and number % {batch_rows} == {marked}:
        mark = Path(__file__).with_name(f"{{__name__}}:app-{{number}}")
        if not mark.exists():
            mark.touch()
            if number // {batch_rows} == 1:
                os.kill(os.getpid(), signal.SIGKILL)

app = install(new_app(broker_url={url!r}), **{settings!r})
app.tasks["note"].__header__ = header  # what is asked of every row's arguments
"""

_numbers = itertools.count()


@pytest.fixture
def place(request: pytest.FixtureRequest) -> str:
    """The rows wait in RabbitMQ ("in broker"), in a store beside it, or in Redis."""
    return str(getattr(request, "param", "in broker"))


@pytest.fixture
def settings(place: str, tmp_path: Path) -> dict[str, Any]:
    """The settings of the app; on RabbitMQ, the claims are always in the store."""
    if place == "redis":
        return {"namespace": "tests"}
    store = {"store": f"sqlite:///{tmp_path}/store.db"}
    return LEVELS | store | ({} if place == "in store" else {"store_tasks": ["nothing"]})


@pytest.fixture
def url(place: str, request: pytest.FixtureRequest) -> str:
    kind = "redis" if place == "redis" else "rabbitmq"
    return str(request.getfixturevalue(f"native_delay_{kind}_url"))


@pytest.fixture
def app(settings: dict[str, Any], apps_folder: Path, url: str) -> str:
    """The path of an app with the tasks of tests' workers."""
    name = f"once_{next(_numbers)}"
    source = APP.format(url=url, settings=settings, batch_rows=BATCH_ROWS, marked=MARKED)
    (apps_folder / f"{name}.py").write_text(source)
    return f"{name}:app"


@contextmanager
def fleet_with_worker(
    url: str, folder: Path, settings: dict[str, Any]
) -> Iterator[tuple[Fleet, Any]]:
    conf = {f"native_delay_{name}": value for name, value in settings.items()}
    with fleet_on(url, folder, **conf) as fleet:
        yield fleet, fleet.worker(concurrency=1)


def rows(spark: Any, *, lost_times: int = 0) -> Any:
    """Rows in two partitions, a third of them due at once. *lost_times* attempts fail."""
    return spark.range(ROWS, numPartitions=2).selectExpr(
        "id as number", "id % 3 * 8 as wait", f"if(id = {LOST_AT}, {lost_times}, 0) as lost_times"
    )


def fan_out(df: Any, app: str, run_id: str, **options: Any) -> FanOut:
    given = {"task": "note", "countdown": "wait", "args": ["number", "lost_times"]}
    return FanOut(df, app=app, run_id=run_id, id_cols=["number"], **given | options)


def ids_of(run_id: str) -> list[str]:
    return [task_id_of(run_id, "note", number) for number in range(ROWS)]


@pytest.mark.parametrize(
    ("way", "place"),
    [("FanOut", "in broker"), in_ci("FanOut", "in store"), in_ci("sink", "in broker")],
    indirect=["place"],
)
def test_rows_of_a_lost_executor_and_of_a_job_that_is_sent_again_run_once(
    spark: Any, app: str, settings: dict[str, Any], url: str, tmp_path: Path, way: str
) -> None:
    """Before and after the tasks run, whole, in part and late; the store says so by itself."""

    def send(df: Any) -> FanOutResult | None:
        if way == "FanOut":
            return fan_out(df, app, "once").send()
        options = {"app": app, "task": "note", "countdown_col": "wait", "run_id": "once"}
        options |= {"args_cols": "number,lost_times", "id_cols": "number"}
        df.write.format("celery").options(**options).mode("append").save()
        return None

    if way == "FanOut":
        result = send(rows(spark, lost_times=1))
        assert result is not None
        assert (result.confirmed, result.done, result.rejected) == (ROWS, 0, 0)
        for _ in range(2):
            fan_out(rows(spark), app, "plain", once=False).send()
    else:
        pytest.importorskip("pyspark.sql.datasource", reason="Spark 3.5 has no such sources")
        with pytest.raises(PySparkException, match="ExecutorLost"):
            send(rows(spark, lost_times=4))
    send(rows(spark).repartition(3))
    send(rows(spark).where("number < 50"))
    ids, plain = (set(ids_of(run_id)) for run_id in ("once", "plain"))
    with fleet_with_worker(url, tmp_path, settings) as (fleet, worker):
        fleet.record.wait_for_ids(list(ids))
        # A worker notes the success after the task has run.
        wait_until(lambda: (result := send(rows(spark))) is None or result.done == ROWS)
        # In a store, the rows that still wait there are overwritten: all of them on a busy machine.
        times = {2} if "store_tasks" in settings else {1, 2}
        if way == "FanOut":
            fleet.record.wait_for_ids(list(plain))
            fleet.record.wait_for(ROWS + min(times) * ROWS)
        worker.stop()  # all that has come has run by then
    counts = Counter(run.id for run in fleet.record.runs())
    assert {counts.pop(task_id) for task_id in ids} == {1}
    if way == "FanOut":
        assert counts.keys() == plain
        assert set(counts.values()) <= times


RETRIED = int(os.environ.get("NATIVE_DELAY_TEST_TASKS", "1000"))
"""The rows of a job that Airflow starts three times.

With ``NATIVE_DELAY_TEST_TASKS=20000``, all 20,000 ran once in each place: on 2026-11-28, within
4 to 6 minutes on two busy cores.
"""


@pytest.mark.ci
@pytest.mark.timeout(600 + RETRIED // 10)
@pytest.mark.parametrize(
    "place",
    [
        # Each starts three Sparks. In these two, the tests above and below send rows again.
        *(pytest.param(f"in {each}", marks=pytest.mark.tools) for each in ("broker", "store")),
        "redis",
    ],
    indirect=True,
)
def test_a_job_that_is_killed_twice_and_sent_a_third_time_runs_each_row_once(
    app: str, settings: dict[str, Any], url: str, apps_folder: Path, tmp_path: Path
) -> None:
    """Rows that became due meanwhile and did not run are not rejected, but run late.

    Each time, a Python worker of Spark is killed, too, at a random point.
    """
    patience_seconds = 3 * PATIENCE_SECONDS + RETRIED / 40
    with fleet_with_worker(url, tmp_path, settings) as (fleet, worker):
        for tries in range(3):
            given = [app, str(RETRIED)]
            with driver(given, apps_folder, tmp_path, script="batch_driver.py") as (process, said):
                wait_until(
                    lambda: executors_of(process) or process.poll() is not None,
                    timeout_seconds=patience_seconds,
                )
                with suppress(subprocess.TimeoutExpired):
                    process.wait(random.uniform(0, 4))
                for pid in executors_of(process)[:1]:
                    os.kill(pid, signal.SIGKILL)
                if tries < 2:
                    fleet.record.wait_for(
                        RETRIED // 4 * (tries + 1), timeout_seconds=patience_seconds
                    )
                    assert process.poll() is None, said()
                else:
                    assert process.wait(patience_seconds) == 0, said()
        fleet.record.wait_for(RETRIED, timeout_seconds=patience_seconds)
        worker.stop()
    counts = Counter(run.args[0] for run in fleet.record.runs())
    assert counts == Counter(range(RETRIED))


def rows_of(batch: int) -> range:
    return range(batch * BATCH_ROWS, (batch + 1) * BATCH_ROWS)


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_batches_of_a_stream_run_once_although_executors_and_drivers_are_killed(
    app: str, settings: dict[str, Any], url: str, apps_folder: Path, tmp_path: Path
) -> None:
    """A driver within the first batch, an executor within the second one.

    And a driver after the last row of the third one, but before Spark notes its end.
    """
    # Each driver starts a JVM with a Spark, which takes a busy machine a minute.
    patience_seconds = 3 * PATIENCE_SECONDS
    source = tmp_path / "source"
    source.mkdir()
    for batch in range(BATCHES):
        lines = [json.dumps({"number": number, "wait": number % 3}) for number in rows_of(batch)]
        (source / f"{batch}.json").write_text("\n".join(lines))
    given = [app, str(source)]
    with fleet_with_worker(url, tmp_path, settings) as (fleet, worker):
        mark = apps_folder / f"{app}-{rows_of(0)[MARKED]}"
        with driver(given, apps_folder, tmp_path) as (process, said):
            wait_until(
                lambda: mark.exists() or process.poll() is not None,
                timeout_seconds=patience_seconds,
            )
            with suppress(subprocess.TimeoutExpired):
                process.wait(random.uniform(0, 1))
            assert process.poll() is None, said()
        for dies_after, ends_with in ((BATCHES - 2, -signal.SIGKILL), (-1, 0)):
            with driver(given, apps_folder, tmp_path, dies_after) as (process, said):
                assert process.wait(patience_seconds) == ends_with, said()
        fleet.record.wait_for(BATCHES * BATCH_ROWS)
        # A batch was sent whole twice: its second time, workers drop what the driver has not found.
        wait_until(lambda: worker.log.count(DROPPED) + done_in(said()) >= BATCH_ROWS)
        worker.stop()  # what has come has run by then, or is dropped
    ran = Counter(run.args[0] for run in fleet.record.runs())
    assert ran == Counter(range(BATCHES * BATCH_ROWS))


def executors_of(driver: subprocess.Popen[bytes]) -> list[int]:
    """The ids of the Python processes in which a driver's local Spark runs tasks."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if b"pyspark.daemon" in (process / "cmdline").read_bytes():
                parent, session = int(fields[1]), int(fields[3])
                if session == driver.pid:
                    parents[int(process.name)] = parent
    return [pid for pid, parent in parents.items() if parent in parents]


def done_in(said: str) -> int:
    """The rows that a driver has found done, and not sent again."""
    return sum(map(int, re.findall(r"(\d+) done before", said)))


@contextmanager
def driver(
    given: list[str],
    apps_folder: Path,
    folder: Path,
    dies_after: int = -1,
    *,
    script: str = "stream_driver.py",
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """A driver, and a function for the output of all drivers; the block's end kills it."""
    log = folder / "driver.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/spark" / script), *given, str(dies_after)],
            cwd=folder,
            env=driver_environ(apps_folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, log.read_text
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_SECONDS)
