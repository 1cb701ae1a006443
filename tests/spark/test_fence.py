"""Fenced runs: Spark retries or fails partitions, and a real worker runs the tasks."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException

from celery_native_delay import FanOutFailed, InvalidFanOut, NoRecords, RecordsUnavailable
from celery_native_delay.fence.run import ABORTED, COMMITTED, OPEN, Record
from celery_native_delay.spark import FanOut, task_id_of
from tests.acceptance.worker import Fleet, fleet_on
from tests.spark.conftest import LEVELS, runs_at
from tests.waiting import PATIENCE_SECONDS, wait_until

ROOT = Path(__file__).parents[2]

ROWS = 400
LOST_AT = 150
"""The row of the first partition at which its executor is lost, after the rows before it."""

BATCHES, BATCH_ROWS, MARKED = 6, 200, 50
"""The batches of a stream, their rows, and the row at which the test learns of the batch."""

APP = """
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
    if (lost_times or 0) < 0:
        raise ValueError("not now")
    if number and number % {batch_rows} == {marked}:
        Path(__file__).with_name(f"{{__name__}}:app-{{number}}").touch()

app = install(new_app(broker_url={url!r}), **{settings!r}, records={records!r})
app.tasks["note"].__header__ = header  # what is asked of every row's arguments
"""

_numbers = itertools.count()


@pytest.fixture(params=["redis", "sqlite"])
def records_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of the records."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/records.db"
    url: str = request.getfixturevalue("native_delay_redis_url")
    return url


@pytest.fixture
def make_fenced_app(apps_folder: Path) -> Callable[..., str]:
    """A function that writes an app with the tasks of tests' workers; it returns its path."""

    def make(url: str, records: str | None = None) -> str:
        name = f"fenced_{next(_numbers)}"
        source = APP.format(
            url=url, settings=LEVELS, records=records, batch_rows=BATCH_ROWS, marked=MARKED
        )
        (apps_folder / f"{name}.py").write_text(source)
        return f"{name}:app"

    return make


@contextmanager
def fleet_with_worker(
    url: str, folder: Path, records: str | None = None, policy: str = "run"
) -> Iterator[tuple[Fleet, Any]]:
    settings = LEVELS | {"records": records, "fence_policy": policy}
    conf = {f"native_delay_{name}": value for name, value in settings.items()}
    with fleet_on(url, folder, **conf) as fleet:
        yield fleet, fleet.worker(concurrency=1)


def rows(spark: Any, *, lost_times: int = 0) -> Any:
    """Rows in two partitions, a third of them due at once. *lost_times* attempts fail."""
    return spark.range(ROWS, numPartitions=2).selectExpr(
        "id as number", "id % 3 * 2 as wait", f"if(id = {LOST_AT}, {lost_times}, 0) as lost_times"
    )


def fan_out(df: Any, app: str, run_id: str, **options: Any) -> FanOut:
    given = {"task": "note", "countdown": "wait", "past": "send", "args": ["number", "lost_times"]}
    return FanOut(df, app=app, run_id=run_id, id_cols=["number"], **given | options)


def test_with_a_fence_a_partition_that_spark_retries_runs_once(
    spark: Any,
    make_fenced_app: Callable[..., str],
    native_delay_rabbitmq_url: str,
    records_url: str,
    tmp_path: Path,
) -> None:
    """Without a fence its tasks run twice, with the same ids, due times and arguments."""
    app = make_fenced_app(native_delay_rabbitmq_url, records_url)
    df = rows(spark, lost_times=1)
    for run_id, fence in (("fenced", True), ("plain", False)):
        result = fan_out(df, app, run_id, fence=fence).send()
        assert sorted(receipt.attempt for receipt in result.receipts) == [0, 1]
        assert result.confirmed == ROWS
    once = {task_id_of("fenced", "note", number) for number in range(ROWS)}
    twice = {task_id_of("plain", "note", number) for number in range(ROWS)}
    with fleet_with_worker(native_delay_rabbitmq_url, tmp_path, records_url) as (fleet, worker):
        fleet.record.wait_for_ids([*once, *twice])
        worker.wait_for_log("is dropped: attempt", count=LOST_AT)
        runs = fleet.record.wait_for(2 * ROWS + LOST_AT)
    counts = Counter(run.id for run in runs)
    assert {counts[task_id] for task_id in once} == {1}
    assert sorted(counts[task_id] for task_id in twice) == [1] * (ROWS - LOST_AT) + [2] * LOST_AT
    assert counts.keys() == once | twice
    assert len({(run.id, run.eta, str(run.args)) for run in runs}) == 2 * ROWS


def test_with_a_fence_no_task_of_a_failed_job_runs(
    spark: Any,
    make_fenced_app: Callable[..., str],
    native_delay_rabbitmq_url: str,
    native_delay_redis_url: str,
    tmp_path: Path,
) -> None:
    """By a fan-out and by a sink; tasks of the sink's next job run."""
    pytest.importorskip("pyspark.sql.datasource", reason="Spark 3.5 has no data sources in Python")
    url = native_delay_rabbitmq_url
    app = make_fenced_app(url, native_delay_redis_url)
    df = rows(spark, lost_times=4)
    with pytest.raises(PySparkException, match="ExecutorLost"):
        fan_out(df, app, "failed", fence=True).send()

    def write(df: Any, run_id: str) -> None:
        options = {"app": app, "task": "note", "countdown_col": "wait"}
        options |= {"args_cols": "number,lost_times", "past": "send", "id_cols": "number"}
        options |= {"run_id": run_id, "fence": "true"}
        df.write.format("celery").options(**options).mode("append").save()

    with pytest.raises(PySparkException, match="ExecutorLost"):
        write(df, "failed sink")
    write(rows(spark), "sink")
    with fleet_with_worker(url, tmp_path, native_delay_redis_url) as (fleet, worker):
        fleet.record.wait_for(ROWS)
        # Of each of these jobs four attempts at its first partition.
        worker.wait_for_log("is dropped: run failed:", count=4 * LOST_AT)
        worker.wait_for_log("is dropped: run failed sink:", count=4 * LOST_AT)
        assert Counter(run.args[0] for run in fleet.record.runs()) == Counter(range(ROWS))
    with runs_at(native_delay_redis_url) as runs:
        found = runs.load(names(native_delay_redis_url))
    states = Counter(record.state for record in found if record)
    assert states == {ABORTED: 2, COMMITTED: 1}


def test_a_committed_run_is_not_sent_again(
    spark: Any,
    make_fenced_app: Callable[..., str],
    native_delay_redis_url: str,
    tmp_path: Path,
) -> None:
    """A run has a run_id, a task and always the same rows.

    Of one that failed, or had a row that was refused, nothing runs: it is sent again as a whole.
    """
    app = make_fenced_app(native_delay_redis_url)
    df = rows(spark)
    with pytest.raises(PySparkException, match="ExecutorLost"):
        fan_out(rows(spark, lost_times=4), app, "run", fence=True).send()
    with pytest.raises(FanOutFailed, match=r"not now; no task of it runs; send all rows again"):
        fan_out(rows(spark, lost_times=-1), app, "run", fence=True).send()
    assert fan_out(df, app, "run", fence=True).send().confirmed == ROWS
    again = fan_out(df.repartition(3), app, "run", fence=True).send()
    assert (again.was_committed, again.rows, again.sent, again.failures) == (True, ROWS, 0, [])
    assert "nothing was sent again" in str(again)
    with pytest.raises(FanOutFailed, match=r"committed before, with other rows.*another run_id"):
        fan_out(df.where("number > 0"), app, "run", fence=True).send()
    other = fan_out(df.limit(7), app, "run", fence=True, task="other", check_task=False)
    assert other.send().confirmed == 7
    with fleet_with_worker(native_delay_redis_url, tmp_path) as (fleet, worker):
        fleet.record.wait_for(ROWS)
        worker.wait_for_log(
            "is dropped: attempt", "of run run:note lost", count=4 * LOST_AT + ROWS - 1
        )
        assert Counter(run.args[0] for run in fleet.record.runs()) == Counter(range(ROWS))


def names(records_url: str) -> list[str]:
    """The names of all runs in a Redis."""
    import redis

    begins_with = "tests.records.v1.run."
    with redis.Redis.from_url(records_url) as client:
        keys = client.keys(f"{begins_with}*")
    return [key.decode().removeprefix(begins_with) for key in keys]


def test_a_fence_that_cannot_be_opened_or_sealed_is_an_error(
    spark: Any,
    make_app: Callable[..., str],
    native_delay_redis: Any,
    native_delay_redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a row is sent if possible; later the error has the result."""
    df = spark.range(10).selectExpr("id as number", "600 as wait", "'' as lost_times")
    app = make_app(native_delay_redis_url, levels=20)
    given = {"task": "shop.remind"}
    with pytest.raises(InvalidFanOut, match="fence to be True or False, got 'redis:") as refused:
        fan_out(df, app, "r", fence="redis://:secret@h", **given)
    assert "secret" not in str(refused.value)

    with pytest.raises(NoRecords, match=r"set native_delay_records = .*nothing was sent"):
        fan_out(df, make_app("amqp://127.0.0.1:1"), "r", fence=True, **given).send()
    monkeypatch.setattr("celery_native_delay.spark.fencing.OPEN_PATIENCE_SECONDS", 0.2)
    away = make_app(native_delay_redis_url, records="redis://127.0.0.1:1")
    with pytest.raises(RecordsUnavailable, match="unreachable: ConnectionError"):
        fan_out(df, away, "r", fence=True, **given).send()
    assert native_delay_redis.client.keys("tests.*") == []

    late = fan_out(df, app, "late", fence=True, **given)
    late.facts  # noqa: B018  asked before, so that the next thing to happen is the opening
    real_collect = type(late.encoded).collect

    def given_up_meanwhile(frame: Any) -> Any:
        rows = real_collect(frame)
        with runs_at(native_delay_redis_url) as runs:
            (run,) = names(native_delay_redis_url)
            runs.seal(run, Record(ABORTED, 0, by="worker-1"), kept_seconds=60)
        return rows

    monkeypatch.setattr(type(late.encoded), "collect", given_up_meanwhile)
    with pytest.raises(FanOutFailed, match=r"10 confirmed.*given up by worker-1") as failed:
        late.send()
    assert failed.value.result.confirmed == 10


def rows_of(batch: int) -> range:
    return range(batch * BATCH_ROWS, (batch + 1) * BATCH_ROWS)


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("policy", "records_url"), [("run", "redis"), ("drop", "sqlite")], indirect=["records_url"]
)
def test_batches_run_once_even_if_their_driver_is_killed(
    make_fenced_app: Callable[..., str],
    native_delay_rabbitmq_url: str,
    records_url: str,
    apps_folder: Path,
    tmp_path: Path,
    policy: str,
) -> None:
    """At random times within a batch, and after its fence is sealed but before Spark notes its end.

    With the policy "drop" also if workers have given a batch up before it is sent again.
    """
    # Each driver starts a JVM with a Spark, which takes a busy machine a minute.
    patience_seconds = 3 * PATIENCE_SECONDS
    chance = random.Random(policy)
    source = tmp_path / "source"
    source.mkdir()
    for batch in range(BATCHES):
        lines = [json.dumps({"number": number, "wait": number % 3}) for number in rows_of(batch)]
        (source / f"{batch}.json").write_text("\n".join(lines))
    app = make_fenced_app(native_delay_rabbitmq_url, records_url)
    given = [app, str(source)]
    with fleet_with_worker(native_delay_rabbitmq_url, tmp_path, records_url, policy) as (
        fleet,
        worker,
    ):
        for batch in range(3):
            mark = apps_folder / f"{app}-{rows_of(batch)[MARKED]}"

            def is_under_way(mark: Path = mark) -> bool:
                return mark.exists() or process.poll() is not None

            with driver(given, apps_folder, tmp_path) as (process, said):
                wait_until(is_under_way, timeout_seconds=patience_seconds)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(chance.uniform(0, 1))
            if policy == "drop":
                wait_until(lambda run=f"reminders-{batch}:note": is_given_up(records_url, run))
        for dies_after, ends_with in ((BATCHES - 2, -signal.SIGKILL), (-1, 0)):
            with driver(given, apps_folder, tmp_path, dies_after) as (process, said):
                assert process.wait(patience_seconds) == ends_with, said()
        assert f"run reminders-{BATCHES - 2}: {BATCH_ROWS} rows, all sent before" in said()
        fleet.record.wait_for(BATCHES * BATCH_ROWS)
        worker.stop()  # what has come has run by then, or is dropped
    ran = Counter(run.args[0] for run in fleet.record.runs())
    assert ran == Counter(range(BATCHES * BATCH_ROWS))
    assert worker.log_lines("is dropped")


def is_given_up(records_url: str, run: str) -> bool:
    """True if a worker has sealed the run of a dead driver; this ends the run's time-out first."""

    def overdue(record: Record | None) -> Record:
        assert record is not None
        return replace(record, deadline=0.0) if record.state == OPEN else record

    with runs_at(records_url) as runs:
        return runs._change(run, overdue, 3600).state != OPEN


@contextmanager
def driver(
    given: list[str], apps_folder: Path, folder: Path, dies_after: int = -1
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """A stream driver, and a function for the output of all drivers; the block's end kills it."""
    log = folder / "driver.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/spark/stream_driver.py"), *given, str(dies_after)],
            cwd=folder,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(apps_folder)]),
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_LOCAL_IP": "127.0.0.1",
                "JAVA_TOOL_OPTIONS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            },
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
