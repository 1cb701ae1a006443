"""Measure how Spark compares planned tasks with telemetry; some losses are made on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

from matplotlib.figure import Figure
from pyspark import __version__ as pyspark_version
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from benchmarks.charts import bars
from benchmarks.measuring import Bench, Result, Target
from celery_native_delay.spark import read_events, reconcile

PLANNED = 3_000_000

BEGIN = datetime(2026, 11, 20, 8, tzinfo=UTC)
SPREAD_SECONDS = 6 * 3600
"""The number of seconds over which due times are spread, except for pending tasks."""
AS_OF = BEGIN + timedelta(hours=8)

#: The numbers of the tasks that are not "ok", within each thousand tasks. Some other tasks are
#: retried, redelivered after their worker was killed, or have a line twice.
INJECTED = {
    "missing": (7,),
    "duplicate": (11, 13),
    "early": (17,),
    "failed": (19, 23, 29),
    "running": (31,),
    "pending": (37,),
    "unplanned": (41,),
}
RETRIED, REDELIVERED, WRITTEN_TWICE = (43, 47), (53,), (59,)


@dataclass
class Planned:
    """A ledger (planned tasks) and the telemetry of its tasks, as Parquet and as JSON lines."""

    ledger: DataFrame
    events: DataFrame
    expected: dict[str, int]


def generate(spark: SparkSession, count: int, folder: Path) -> Planned:
    """Write a ledger and telemetry of *count* tasks to disk; *count* is a multiple of 1000.

    The telemetry has two lines for each attempt, shuffled.
    """
    if count % 1000:
        raise ValueError(f"expected a multiple of 1000 tasks, got {count}")
    injected = {name: len(of) * count // 1000 for name, of in INJECTED.items()}
    kind = F.coalesce(
        *(F.when(F.col("number").isin(*of), name) for name, of in INJECTED.items()), F.lit("ok")
    )
    tasks = (
        spark.range(count)
        .withColumn("number", F.col("id") % 1000)
        .withColumn("kind", kind)
        .withColumn("random", F.abs(F.xxhash64("id")))
        .select(
            F.md5(F.col("id").cast("string")).alias("task_id"),
            F.timestamp_micros(
                F.lit(int(BEGIN.timestamp()) * 1_000_000)
                + F.col("random") % (SPREAD_SECONDS * 1_000_000)
                + F.when(F.col("kind") == "pending", 24 * 3_600_000_000).otherwise(0)
            ).alias("due"),
            F.concat(F.lit("queue-"), F.col("random") % 4).alias("queue"),
            F.lit("run-1").alias("run_id"),
            F.col("id").alias("order_id"),
            "number",
            "kind",
            "random",
        )
    )
    ledger = tasks.where("kind <> 'unplanned'").drop("number", "kind", "random")
    ledger.write.parquet(str(folder / "ledger"))
    events_of(tasks).write.json(str(folder / "events"), timestampFormat=TELEMETRY_FORMAT)
    return Planned(
        spark.read.parquet(str(folder / "ledger")),
        read_events(spark, str(folder / "events")),
        {**injected, "ok": count - sum(injected.values())},
    )


#: The format in which telemetry writes a time.
TELEMETRY_FORMAT = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"


def events_of(tasks: DataFrame) -> DataFrame:
    """Return the telemetry lines about *tasks*, shuffled like the lines of many workers."""
    number, due_us = F.col("number"), F.unix_micros("due")
    # Most tasks are some milliseconds late, some are seconds late.
    late_us = F.col("random") % 30_000 + F.when(number == 60, 5_000_000).otherwise(0)
    start_us = due_us + F.when(F.col("kind") == "early", -250_000).otherwise(late_us)

    def attempt(which: Any, retries: int, after_us: int, outcome: str, ends: Any = True) -> Any:
        """Return an array with the two lines of an attempt, for tasks where *which* is true."""
        started = F.timestamp_micros(start_us + after_us)
        finished = F.timestamp_micros(start_us + after_us + 40_000)
        worker = F.concat(F.lit("worker-"), (F.col("random") + after_us) % 8)
        both = [
            F.struct(
                F.lit(retries).cast("bigint").alias("retries"),
                started.alias("started"),
                (finished if ended else F.lit(None).cast("timestamp")).alias("finished"),
                F.lit(outcome if ended else None).cast("string").alias("outcome"),
                worker.alias("worker"),
            )
            for ended in (False, True)
        ]
        lines = F.when(F.lit(ends) if isinstance(ends, bool) else ends, F.array(*both)).otherwise(
            F.array(both[0])
        )
        return F.when(which, lines).otherwise(F.array())

    ran = ~F.col("kind").isin("missing", "pending")
    failed, retried = F.col("kind") == "failed", number.isin(*RETRIED)
    killed = (F.col("kind") == "running") | number.isin(*REDELIVERED)
    lines = F.concat(
        attempt(ran & ~failed & ~retried, 0, 0, "success", ~killed),
        attempt(ran & failed, 0, 0, "failure"),
        attempt(retried, 0, 0, "retry"),
        attempt(retried, 1, 1_000_000, "success"),
        attempt((F.col("kind") == "duplicate") | number.isin(*REDELIVERED), 0, 700_000, "success"),
    )
    lines = F.when(number.isin(*WRITTEN_TWICE), F.concat(lines, lines)).otherwise(lines)
    return (
        tasks.select("task_id", "due", "queue", F.explode(lines).alias("line"))
        .select(
            F.col("task_id").alias("id"),
            F.lit("shop.remind").alias("task"),
            F.col("task_id").alias("root_id"),
            "line.worker",
            F.lit(4242).cast("bigint").alias("pid"),
            "queue",
            "line.retries",
            "due",
            "line.started",
            "line.finished",
            "line.outcome",
            F.lit(None).cast("timestamp").alias("retry_due"),
        )
        .repartition(8)
    )


@contextmanager
def session(bench: Bench) -> Iterator[SparkSession]:
    """Yield a Spark session on all processors of this machine."""
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("native-delay-bench")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "16")
        .config("spark.local.dir", str(bench.folder))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def run(bench: Bench) -> Result:
    with session(bench) as spark:
        return measure(spark, bench)


def measure(spark: SparkSession, bench: Bench) -> Result:
    count = bench.count(PLANNED // 1000, at_least=1) * 1000
    folder = bench.folder / "reconcile"
    folder.mkdir()
    with bench.progress("reconcile", 4) as done:
        seconds: dict[str, float] = {}

        @contextmanager
        def timed(what: str) -> Iterator[None]:
            started = perf_counter()
            yield
            seconds[what] = perf_counter() - started
            done(len(seconds))

        with timed("write ledger and events"):
            planned = generate(spark, count, folder)
        rows = planned.events.count()
        result = reconcile(planned.ledger, planned.events, as_of=AS_OF)
        with timed("verdicts"):
            result = result.stored(str(folder / "verdicts"))
        with timed("counts"):
            found = result.counts()
        with timed("summary by queue and worker"):
            (overall,) = result.summary().collect()
            result.summary("queue", "worker").collect()
        wrong = sum(abs(found[verdict] - planned.expected[verdict]) for verdict in found)
        reread = result.missing().count()
    return Result(
        "Spark: reconcile",
        f"pyspark {pyspark_version}, local[2]: {count:,} tasks, and {rows:,} lines of telemetry as "
        f"JSON. The ledger and the verdicts are Parquet. The time of the verdicts includes reading "
        f"and writing.",
        rows=[
            {"verdict": name, "put in": planned.expected[name], "found": found[name]}
            for name in found
        ],
        targets=[
            Target("verdicts that are wrong", wrong, "≤", 0, "tasks"),
            Target(f"verdicts, for {count:,} tasks", seconds["verdicts"], "≤", 120, "s"),
        ],
        notes=[
            ", ".join(f"{what}: {took:.1f} s" for what, took in seconds.items()),
            f"missing(): {reread:,} rows; lateness in ms: "
            + ", ".join(f"{q} {overall[f'late_{q}'] * 1e3:,.0f}" for q in ("p50", "p99", "max")),
        ],
        series={what: took for what, took in seconds.items() if not what.startswith("write")},
    )


def draw(result: Result) -> Figure:
    rows = [(what, took, None, True) for what, took in result.series.items()]
    return bars("Spark: time of each step of a reconciliation", "seconds", rows)
