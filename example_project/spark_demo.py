"""Remind a day's customers from Spark, on a private broker, and prove that each was reminded.

`make demo-spark` or `python -m example_project.spark_demo [BROKER]`. The pipeline is
`reminders()`; everything else starts a broker, a worker and a local Spark, and shows what happens.
A day passes in twenty seconds. Exit status: 0 if every task ran once and not early, 1 if not, 2
without a broker or Java.
"""

import os
import shutil
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from rich.console import Console

from celery_native_delay.spark import FanOut, Reconciliation, read_events, reconcile
from example_project.demo import main, running_worker
from example_project.demo_broker import REPOSITORY, demo_broker
from example_project.orders import DAY, PATH

#: How many seconds of the data's day pass in one of the demo's.
SPEED = 86_400 / 20

#: The first reminder is due this long after the start: Spark's first job takes its time.
LEAD_SECONDS = 30

RUN_LIMIT_SECONDS = 90

#: Where the lateness is drawn, in the folder this is started from.
PICTURE = "spark-demo.png"


def reminders(orders: DataFrame, start: datetime) -> FanOut:
    """What is sent: an e-mail to everybody who wants one, when the parcel is to come.

    *start* is when the day of the data begins; a real pipeline would take the times as they are,
    with eta="delivery" and eta_zone=col("zone").
    """
    at = f.try_to_timestamp(f.concat_ws(" ", "delivery", "zone"))
    into_day = f.unix_micros(at) - f.lit(int(DAY.timestamp() * 1_000_000))
    due = f.lit(int(start.timestamp() * 1_000_000)) + into_day / f.lit(SPEED)
    return FanOut(
        orders.where("not opted_out").select(
            "*",
            f.timestamp_micros(due.cast("long")).alias("due"),
            f.concat(f.lit("Your parcel comes at "), "delivery").alias("subject"),
        ),
        app="example_project.app:app",
        task="example_project.tasks.send_email",
        eta="due",
        args=["email", "subject"],
        queue=f.lit("emails"),
        id_cols=["order_id"],
        run_id=f"reminders-{start:%Y%m%dT%H%M%S}",
    )


def session_of(folder: Path, broker_url: str) -> SparkSession:
    """Two slots on this machine, or the cluster that SPARK_MASTER names.

    Its Python must have what this one has; the app finds its broker in the environment.
    """
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)}
    if "SPARK_MASTER" not in os.environ:
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    session: SparkSession = (
        SparkSession.builder.master(os.environ.get("SPARK_MASTER", "local[2]"))
        .appName("reminders")
        .config("spark.executorEnv.CELERY_BROKER_URL", broker_url)
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


def demonstrate(asked: str | None, folder: Path, console: Console) -> bool:
    """Run it all; returns whether all went as promised."""
    record, telemetry, ledger = folder / "record.jsonl", folder / "telemetry", folder / "ledger"
    record.touch()
    with ExitStack() as stack:
        console.print("starting the broker …")
        broker = stack.enter_context(demo_broker(asked or "rabbitmq"))
        os.environ |= {
            "CELERY_BROKER_URL": broker.url,
            "EXAMPLE_RECORD": str(record),
            "EXAMPLE_TELEMETRY": str(telemetry),
        }
        console.print(f"starting Spark, and a worker on {broker.name} …")
        spark = session_of(folder, broker.url)
        stack.callback(spark.stop)
        with running_worker(folder / "worker.log"):
            fan_out = reminders(
                spark.read.parquet(str(PATH)), datetime.now(UTC) + timedelta(seconds=LEAD_SECONDS)
            )
            console.rule("plan")
            plan = fan_out.plan()
            console.print(str(plan), soft_wrap=True)
            fan_out.ledger().write.parquet(str(ledger))  # before anything is sent
            console.rule("send")
            console.print(str(fan_out.send()), soft_wrap=True)
            console.rule("run")
            _wait_for(plan.accepted, record, console)
        console.rule("reconcile")
        found = reconcile(
            spark.read.parquet(str(ledger)),
            read_events(spark, str(telemetry)),
            as_of=datetime.now(UTC),
            grace_seconds=0,
        ).stored(str(folder / "verdicts"))
        return _tell(found, console)


def _wait_for(count: int, record: Path, console: Console) -> None:
    """Return when *count* tasks have started, or it takes too long."""
    deadline = time.monotonic() + RUN_LIMIT_SECONDS
    told = 0.0
    while True:
        started = len(record.read_text().splitlines())
        enough = started >= count
        if enough or time.monotonic() > told + 3:
            told = time.monotonic()
            console.print(f"{started:,} of {count:,} ran")
        if enough or time.monotonic() > deadline:
            return
        time.sleep(0.2)


def _tell(found: Reconciliation, console: Console) -> bool:
    """Show the verdicts; returns whether every task is ok."""
    verdicts = {verdict: count for verdict, count in found.counts().items() if count}
    console.print(", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.items()))
    (late,) = found.summary().collect()
    if late["late_p50"] is not None:
        console.print(
            f"late by {late['late_p50'] * 1000:.0f} ms (median), {late['late_p99'] * 1000:.0f} ms "
            f"(p99), {late['late_max'] * 1000:.0f} ms at most"
        )
    found.picture(due_seconds=1).savefig(PICTURE)
    console.print(f"over the due time: {PICTURE}", soft_wrap=True)
    return verdicts.keys() == {"ok"}


if __name__ == "__main__":
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        print("Spark needs Java 17: run scripts/setup_spark.sh")
        sys.exit(2)
    sys.exit(main(demonstrate))
