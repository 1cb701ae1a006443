"""Jobs whose partitions Spark runs again, or gives up, and a real worker behind them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException

from celery_native_delay import FanOutFailed, FenceUnavailable, InvalidFanOut
from celery_native_delay.fence import fence_store
from celery_native_delay.fence.run import ABORTED, COMMITTED, Record
from celery_native_delay.spark import FanOut, task_id_of
from tests.acceptance.worker import Fleet, fleet_on
from tests.spark.conftest import LEVELS

ROWS = 400
LOST_AT = 150
"""The row of the first partition at which its executor is lost, when those before are sent."""

APP = """
from celery_native_delay import install
from pyspark import TaskContext
from tests.acceptance.apps.tasks import new_app

class ExecutorLost(BaseException):
    pass

def header(number, lost_times):
    context = TaskContext.get()
    if context is not None and context.attemptNumber() < (lost_times or 0):
        raise ExecutorLost()

app = install(new_app(broker_url={url!r}), **{settings!r})
app.tasks["note"].__header__ = header  # what is asked of every row's arguments
"""

_numbers = itertools.count()


@pytest.fixture(params=["rabbitmq", "redis"])
def broker_url(request: pytest.FixtureRequest) -> str:
    """The store is the same Redis where that is the broker, too."""
    url: str = request.getfixturevalue(f"native_delay_{request.param}_url")
    return url


@pytest.fixture
def store_url(native_delay_redis_url: str) -> str:
    return native_delay_redis_url


@pytest.fixture
def make_fenced_app(apps_folder: Path) -> Callable[[str], str]:
    """Makes an app with the tasks that tests' workers run; returns where to import it from."""

    def make(url: str) -> str:
        name = f"fenced_{next(_numbers)}"
        (apps_folder / f"{name}.py").write_text(APP.format(url=url, settings=LEVELS))
        return f"{name}:app"

    return make


@contextmanager
def fleet_with_worker(url: str, folder: Path, store_url: str) -> Iterator[tuple[Fleet, Any]]:
    conf = {f"native_delay_{name}": value for name, value in LEVELS.items()}
    with fleet_on(url, folder, **conf) as fleet:
        yield fleet, fleet.worker(concurrency=1, native_delay_fence=store_url)


def rows(spark: Any, *, lost_times: int = 0) -> Any:
    """Two partitions. A third of the rows is due at once; in so many attempts one fails."""
    return spark.range(ROWS, numPartitions=2).selectExpr(
        "id as number", "id % 3 * 2 as wait", f"if(id = {LOST_AT}, {lost_times}, 0) as lost_times"
    )


def fan_out(df: Any, app: str, run_id: str, **options: Any) -> FanOut:
    given = {"task": "note", "countdown": "wait", "past": "send", "args": ["number", "lost_times"]}
    return FanOut(df, app=app, run_id=run_id, id_cols=["number"], **given | options)


def test_a_partition_that_spark_runs_again_runs_once_behind_a_fence(
    spark: Any,
    make_fenced_app: Callable[[str], str],
    broker_url: str,
    store_url: str,
    tmp_path: Path,
) -> None:
    """And without one its tasks come twice, with equal ids, etas and arguments."""
    app = make_fenced_app(broker_url)
    df = rows(spark, lost_times=1)
    for run_id, options in (("fenced", {"fence": store_url}), ("plain", {})):
        result = fan_out(df, app, run_id, **options).send()
        assert sorted(receipt.attempt for receipt in result.receipts) == [0, 1]
        assert result.confirmed == ROWS
    once = {task_id_of("fenced", "note", number) for number in range(ROWS)}
    twice = {task_id_of("plain", "note", number) for number in range(ROWS)}
    with fleet_with_worker(broker_url, tmp_path, store_url) as (fleet, worker):
        fleet.record.wait_for_ids([*once, *twice])
        worker.wait_for_log("is dropped: attempt", count=LOST_AT)
        runs = fleet.record.wait_for(2 * ROWS + LOST_AT)
    counts = Counter(run.id for run in runs)
    assert {counts[task_id] for task_id in once} == {1}
    assert sorted(counts[task_id] for task_id in twice) == [1] * (ROWS - LOST_AT) + [2] * LOST_AT
    assert counts.keys() == once | twice
    assert len({(run.id, run.eta, str(run.args)) for run in runs}) == 2 * ROWS


def test_of_a_job_that_fails_nothing_runs(
    spark: Any,
    make_fenced_app: Callable[[str], str],
    native_delay_rabbitmq_url: str,
    store_url: str,
    tmp_path: Path,
) -> None:
    """Of a fan-out and of a sink; the sink's next job, which does not fail, runs."""
    pytest.importorskip("pyspark.sql.datasource", reason="Spark 3.5 has no data sources in Python")
    url = native_delay_rabbitmq_url
    app = make_fenced_app(url)
    df = rows(spark, lost_times=4)
    with pytest.raises(PySparkException, match="ExecutorLost"):
        fan_out(df, app, "failed", fence=store_url).send()

    def write(df: Any, run_id: str) -> None:
        options = {"app": app, "task": "note", "countdown_col": "wait"}
        options |= {"args_cols": "number,lost_times", "past": "send", "id_cols": "number"}
        options |= {"run_id": run_id, "fence": store_url}
        df.write.format("celery").options(**options).mode("append").save()

    with pytest.raises(PySparkException, match="ExecutorLost"):
        write(df, "failed sink")
    write(rows(spark), "sink")
    with fleet_with_worker(url, tmp_path, store_url) as (fleet, worker):
        fleet.record.wait_for(ROWS)
        # Of each of these jobs four attempts at its first partition.
        worker.wait_for_log("is dropped: run failed:", count=4 * LOST_AT)
        worker.wait_for_log("is dropped: run failed sink:", count=4 * LOST_AT)
        assert Counter(run.args[0] for run in fleet.record.runs()) == Counter(range(ROWS))
    with fence_store(store_url) as store:
        states = Counter(record.state for record in store.load(names(store_url)) if record)
    assert states == {ABORTED: 2, COMMITTED: 1}


def names(store_url: str) -> list[str]:
    """Of all runs in the store."""
    import redis

    with redis.Redis.from_url(store_url) as client:
        keys = client.keys("native_delay_fence:*")
    return [key.decode().partition(":")[2] for key in keys]


def test_a_fence_that_cannot_be_opened_or_sealed_is_an_error(
    spark: Any,
    make_app: Callable[..., str],
    native_delay_redis: Any,
    native_delay_redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before a row is sent where that can be; afterwards the error has the result."""
    df = spark.range(10).selectExpr("id as number", "600 as wait", "'' as lost_times")
    app = make_app(native_delay_redis_url, levels=20)
    given = {"task": "shop.remind"}
    with pytest.raises(InvalidFanOut, match=r"fence to be None or a URL.*got 'amqp'") as refused:
        fan_out(df, app, "r", fence="amqp://guest:secret@broker", **given)
    assert "secret" not in str(refused.value)
    assert "secret" not in repr(fan_out(df, app, "r", fence="redis://:secret@h", **given).options)

    monkeypatch.setattr("celery_native_delay.spark.fencing.OPEN_PATIENCE_SECONDS", 0.2)
    with pytest.raises(FenceUnavailable, match="does not serve"):
        fan_out(df, app, "r", fence="redis://127.0.0.1:1", **given).send()
    assert native_delay_redis.client.keys("tests.*") == []

    late = fan_out(df, app, "late", fence=native_delay_redis_url, **given)
    late.facts  # noqa: B018  asked before, so that the next thing to happen is the opening
    real_collect = type(late.encoded).collect

    def given_up_meanwhile(frame: Any) -> Any:
        rows = real_collect(frame)
        with fence_store(native_delay_redis_url) as store:
            (run,) = names(native_delay_redis_url)
            store.seal(run, Record(ABORTED, 0, by="worker-1"), ttl_seconds=60)
        return rows

    monkeypatch.setattr(type(late.encoded), "collect", given_up_meanwhile)
    with pytest.raises(FanOutFailed, match=r"10 confirmed.*given up by worker-1") as failed:
        late.send()
    assert failed.value.result.confirmed == 10
    assert "has no native_delay_fence" in caplog.text
