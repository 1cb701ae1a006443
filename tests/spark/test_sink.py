"""The sink ``format("celery")``, which sends the same tasks as FanOut."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from time import time_ns
from typing import Any

import pytest
from celery import Celery

pytest.importorskip("pyspark.sql.datasource", reason="Spark 3.5 has no data sources in Python")

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import functions as f

from celery_native_delay import Run, install
from celery_native_delay.app.installation import ask_broker
from celery_native_delay.durations import DAY_US
from celery_native_delay.message import ONCE
from celery_native_delay.records.runs import latest_runs
from celery_native_delay.spark import task_id_of
from tests.integration.traffic import inbox
from tests.spark.conftest import LEVELS
from tests.spark.test_fan_out import number_of

MakeApp = Callable[..., str]


def writer_of(df: Any, at: str, **options: Any) -> Any:
    whole = {"app": at, "task": "shop.remind", "countdown_col": "wait", "kwargs_cols": "number"}
    return df.write.format("celery").options(**whole | options).mode("append")


def test_a_data_frame_is_written(
    spark: Any, make_app: MakeApp, native_delay_rabbitmq_url: str
) -> None:
    df = spark.range(1_000).selectExpr("id as number", "2.5D as wait", "if(id<500,'vip','plain') q")
    options = {"id_cols": "number", "run_id": "r", "queue_col": "q", "smear": "1s"}
    writer_of(df, make_app(native_delay_rabbitmq_url), **options).save()
    with inbox(native_delay_rabbitmq_url, "plain", "vip") as letters:
        came = letters.wait_for(1_000)
    assert sorted(map(number_of, came)) == list(range(1_000))
    for arrival in came:
        headers = arrival.message.headers
        assert headers["id"] == task_id_of("r", "shop.remind", number_of(arrival))
        assert arrival.at >= datetime.fromisoformat(headers["eta"]).timestamp()
        assert arrival.queue == ("vip" if number_of(arrival) < 500 else "plain")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tsak": "x"}, "unknown option 'tsak'"),
        ({"rate": "1/s"}, "use FanOut.df, rate="),
        ({"app": "nowhere:app"}, "No module named 'nowhere'"),
        ({"kwargs_cols": '{"nombre": "number"}'}, "nombre"),
        ({"kwargs_cols": '{"number": "numbr"}'}, "a column of this DataFrame"),
        ({"countdown_col": "text"}, "a number of seconds, got string"),
        ({"connections": "4"}, "use FanOut.df, connections="),
        ({"max_rate": "100"}, "cannot keep max_rate: use FanOut"),
        ({"mode": "overwrite"}, "append"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_columns_and_app_are_checked_before_a_row_is_sent(
    spark: Any, make_app: MakeApp, options: dict[str, Any], message: str
) -> None:
    df = spark.sql("select 1L as number, 5D as wait, 'x' as text")
    mode = options.pop("mode", "append")
    writer = writer_of(df, make_app("amqp://127.0.0.1:1"), **options).mode(mode)
    with pytest.raises(AnalysisException, match=message):
        writer.save()


def test_a_bad_row_fails_the_job_unless_on_reject_is_skip(
    spark: Any, make_app: MakeApp, native_delay_rabbitmq_url: str
) -> None:
    df = spark.sql("select id as number, if(id = 7, null, 1D) as wait from range(0, 20, 1, 1)")
    app = make_app(native_delay_rabbitmq_url)
    with pytest.raises(PySparkException, match=r"no due time.*'number': 7.*on_reject='skip'"):
        writer_of(df, app).save()
    no_utf8 = df.where("number = 8").withColumn("text", f.expr("cast(X'FF41' as string)"))
    with pytest.raises(PySparkException, match=r"kwargs\['text'\].*is not valid UTF-8"):
        writer_of(no_utf8, app, kwargs_cols="text").save()
    writer_of(df, app, on_reject="skip", id_cols="number", run_id="r").save()
    ids = {task_id_of("r", "shop.remind", number) for number in range(20) if number != 7}
    with inbox(native_delay_rabbitmq_url, "plain") as letters:
        assert letters.receive_until(
            lambda: ids <= {a.message.headers["id"] for a in letters.arrivals}
        )
    assert 7 not in {number_of(arrival) for arrival in letters.arrivals}


def test_its_run_counts_what_was_written(
    spark: Any, make_app: MakeApp, native_delay_redis_url: str
) -> None:
    """And is forgotten a week after its last task."""
    df = spark.range(5).selectExpr("id as number", "if(id = 3, null, 60D) as wait")
    options = {"id_cols": "number", "run_id": "night", "on_reject": "skip"}
    writer_of(df, make_app(native_delay_redis_url), **options).save()
    app = install(Celery("shop", broker=native_delay_redis_url, set_as_current=False), **LEVELS)
    status = Run("night", app=app).status()
    assert (status.planned, status.sent, status.rejected, status.waiting) == (5, 4, 1, 4)
    (record,) = ask_broker(app, lambda channel, chosen: latest_runs(channel.records(chosen), 9))
    assert 6.9 * DAY_US < record.kept_us - time_ns() // 1000 < 7.1 * DAY_US


@pytest.mark.parametrize("once", [False, True], ids=["plain", "once"])
def test_a_stream_replays_a_batch_with_the_same_task_ids(
    spark: Any, make_app: MakeApp, native_delay_rabbitmq_url: str, tmp_path: Path, once: bool
) -> None:
    """With the option once, workers run one of the two messages."""
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    app = make_app(native_delay_rabbitmq_url)

    def run() -> None:
        stream = spark.readStream.schema("number long, at timestamp").json(str(source))
        query = (
            stream.writeStream.format("celery")
            .options(app=app, task="shop.remind", eta_col="at", past="send", kwargs_cols="number")
            .options(id_cols="number", run_id="stream", checkpointLocation=str(checkpoint))
            .option("once", once)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(60)
        assert query.exception() is None

    def add(*numbers: int) -> None:
        rows = spark.createDataFrame([(n,) for n in numbers], "number long")
        rows.withColumn("at", f.current_timestamp()).write.mode("append").json(str(source))

    add(1, 2)
    run()
    add(3)
    run()
    # As if the driver had died before it could write down that the batch was done.
    for name in ("1", ".1.crc"):
        (checkpoint / "commits" / name).unlink()
    run()
    with inbox(native_delay_rabbitmq_url, "plain") as letters:
        came = letters.wait_for(4)
    ids = sorted((number_of(a), a.message.headers["id"]) for a in came)
    batches = {1: 0, 2: 0, 3: 1}
    expected = [(n, task_id_of(f"stream-{batches[n]}", "shop.remind", n)) for n in (1, 2, 3, 3)]
    assert ids == expected
    assert {bool(a.message.headers.get(ONCE)) for a in came} == {once}
