"""Measure sending DataFrame rows as delayed tasks: ``FanOut``, the sink, and hand-written loops."""

from __future__ import annotations

import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any

from celery.utils import uuid
from matplotlib.figure import Figure
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from benchmarks.apps import QUEUE, REPOSITORY, TASK, sending
from benchmarks.charts import quartile_bars
from benchmarks.measuring import Bench, Result, Target, median, quartiles
from celery_native_delay.spark import FanOut
from tests.postgresql import private_postgresql

ROUNDS = 3
ROWS = 100_000
BY_HAND_ROWS = 20_000
"""The number of rows for the hand-written loop that takes 1 ms per row."""
ENCODED_ROWS = 1_000_000
PARTITIONS = 4
COUNTDOWN_SECONDS = 3600

BY_HAND = "foreachPartition, apply_async, pool, confirmed"
FAN_OUT = "FanOut.send()"
IN_STORE = "PostgreSQL store: FanOut.send()"


def run(bench: Bench) -> Result:
    rounds = bench.count(ROUNDS, at_least=1)
    rows, by_hand = bench.count(ROWS, at_least=1_000), bench.count(BY_HAND_ROWS, at_least=500)
    encoded = bench.count(ENCODED_ROWS)
    with ExitStack() as stack:
        ours, plain = (stack.enter_context(bench.vhost()) for _ in range(2))
        for method, url in (("ours", ours), ("held", plain)):
            stack.enter_context(sending(method, url))
        redis, redis_plain = (stack.enter_context(bench.redis()).url for _ in range(2))
        spark = _session(
            bench,
            BENCH_SPARK_URL=ours,
            BENCH_SPARK_PLAIN_URL=plain,
            BENCH_SPARK_STORE=stack.enter_context(private_postgresql()).new_database(),
            BENCH_SPARK_REDIS_URL=redis,
            BENCH_SPARK_REDIS_PLAIN_URL=redis_plain,
        )
        stack.callback(spark.stop)
        # The rows of each way, and what prepares its sending, whose time is not measured.
        ways: dict[str, tuple[int, Callable[[Any], Callable[[], object]]]] = {
            BY_HAND: (by_hand, _by_hand),
            FAN_OUT: (rows, _fan_out),
            "foreachPartition, kombu's Producer, confirmed": (by_hand, _by_kombu),
            "Redis: foreachPartition, apply_async, pool": (
                by_hand,
                partial(_by_hand, app="redis_plain"),
            ),
            "Redis: FanOut.send()": (rows, partial(_fan_out, app="redis_app")),
            IN_STORE: (rows, partial(_fan_out, app="store_app")),
            'format("celery")': (rows, _sink),
            "FanOut's Spark part alone": (encoded, _encode),
        }

        def rate(way: str, part: int = 1) -> float:
            """Return the rows per second of a part of the rows."""
            rows, ready = ways[way]
            df = spark.range(rows // part, numPartitions=PARTITIONS).withColumnRenamed(
                "id", "index"
            )
            send = ready(df)
            started = perf_counter()
            send()
            return rows // part / (perf_counter() - started)

        for way in ways:  # the JVM, the Python workers, the delay levels
            rate(way, part=20)
        order, rates = random.Random(1), defaultdict(list)
        for _ in range(rounds):
            for way in order.sample(list(ways), len(ways)):
                rates[way].append(rate(way))
    result = Result(
        "Delayed tasks from Spark",
        f"{rounds} rounds on local[2] with {PARTITIONS} partitions; brokers and executors share "
        f"the processors. Each round runs every way, in random order, until the broker has "
        f"confirmed the last task: {rows:,} rows, by hand {by_hand:,}. "
        f"The Spark part alone writes {encoded:,} rows to a noop sink.",
    )
    for way in ways:
        low, middle, high = result.series[way] = quartiles(rates[way])
        result.rows.append({"way": way, "rows/s": middle, "p25": low, "p75": high})
    by_fan_out, by_apply_async = median(rates[FAN_OUT]), median(rates[BY_HAND])
    result.targets += [
        Target("FanOut.send() : by hand", by_fan_out / by_apply_async, "≥", 3),
        Target("FanOut.send() into PostgreSQL", median(rates[IN_STORE]), "≥", 15_000, "rows/s"),
    ]
    return result


def _session(bench: Bench, **environment: str) -> SparkSession:
    os.environ |= environment
    os.environ |= {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    session: SparkSession = (
        SparkSession.builder.master("local[2]")
        .appName("bench")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.warehouse.dir", str(bench.folder / "warehouse"))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    return session


def _by_hand(df: Any, app: str = "plain") -> Callable[[], object]:
    def send(rows: Iterable[Any]) -> None:
        from benchmarks import spark_app

        celery = getattr(spark_app, app)
        task = celery.tasks[TASK]
        with celery.producer_pool.acquire(block=True) as producer:
            for row in rows:
                task.apply_async((row["index"],), countdown=COUNTDOWN_SECONDS, producer=producer)

    return lambda: df.foreachPartition(send)


def _by_kombu(df: Any) -> Callable[[], object]:
    def send(rows: Iterable[Any]) -> None:
        from benchmarks import spark_app

        celery = spark_app.plain
        with celery.connection_for_write() as connection, connection.Producer() as producer:
            for row in rows:
                message = celery.amqp.as_task_v2(
                    uuid(), TASK, (row["index"],), countdown=COUNTDOWN_SECONDS
                )
                producer.publish(
                    message.body,
                    headers=message.headers,
                    exchange=QUEUE,
                    routing_key=QUEUE,
                    serializer="json",
                    **message.properties,
                )

    return lambda: df.foreachPartition(send)


def _fan_out_of(df: Any, app: str = "app") -> FanOut:
    return FanOut(
        df,
        app=f"benchmarks.spark_app:{app}",
        task=TASK,
        countdown=f.lit(COUNTDOWN_SECONDS),
        args=["index"],
        id_cols=["index"],
        queue=f.lit(QUEUE),
    )


def _fan_out(df: Any, app: str = "app") -> Callable[[], object]:
    return lambda: _fan_out_of(df, app).send()


def _encode(df: Any) -> Callable[[], object]:
    writer = _fan_out_of(df).encoded.write  # asks the app first
    return writer.format("noop").mode("overwrite").save


def _sink(df: Any) -> Callable[[], object]:
    options = {"app": "benchmarks.spark_app:app", "task": TASK, "countdown_col": "wait"}
    rows = df.withColumn("wait", f.lit(COUNTDOWN_SECONDS))
    writer = rows.write.format("celery").options(**options, args_cols="index", id_cols="index")
    return writer.mode("append").save


def draw(result: Result) -> Figure:
    sending = {label: one for label, one in result.series.items() if "alone" not in label}
    return quartile_bars(
        "Sending tasks from Spark",
        "rows per second",
        sending,
        lambda label: "foreachPartition" not in label,
    )
