"""Remind a day's customers from Spark, on a private broker, and prove that each was reminded.

`make demo-spark` or `python -m example_project.spark_demo [BROKER]`. The pipeline is
`reminders()`; everything else starts a broker, a worker and a local Spark, and shows what happens.
A day passes in twenty seconds. Exit status: 0 if every task ran once and not early, 1 if not, 2
without a broker or Java.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from rich.console import Console

from celery_native_delay.spark import FanOut
from celery_native_delay.testing import BrokerFailed, BrokerMissing
from example_project.demo import WorkerFailed, running_worker
from example_project.demo_broker import REPOSITORY, demo_broker
from example_project.orders import DAY, PATH

#: How many seconds of the data's day pass in one of the demo's.
SPEED = 86_400 / 20

#: The first reminder is due this long after the start: Spark's first job takes its time.
LEAD_SECONDS = 25

RUN_LIMIT_SECONDS = 90


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
    record = folder / "record.jsonl"
    record.touch()
    with ExitStack() as stack:
        console.print("starting the broker …")
        broker = stack.enter_context(demo_broker(asked))
        os.environ |= {"CELERY_BROKER_URL": broker.url, "EXAMPLE_RECORD": str(record)}
        console.print(f"starting a worker on {broker.name}, and Spark …")
        stack.enter_context(running_worker(folder / "worker.log"))
        spark = session_of(folder, broker.url)
        stack.callback(spark.stop)

        fan_out = reminders(
            spark.read.parquet(str(PATH)), datetime.now(UTC) + timedelta(seconds=LEAD_SECONDS)
        )
        console.rule("plan")
        console.print(str(fan_out.plan()), soft_wrap=True)
        # Somewhere safe, and before anything is sent; here this process will do.
        ledger = fan_out.ledger().select("task_id", f.unix_micros("due").alias("due_us"))
        due = {row.task_id: row.due_us for row in ledger.collect()}
        console.rule("send")
        console.print(str(fan_out.send()), soft_wrap=True)
        console.rule("run")
        starts = _wait_for(len(due), record, console)
    return _tell(due, starts, console)


def _wait_for(count: int, record: Path, console: Console) -> list[dict[str, Any]]:
    """The starts that the worker has recorded, when there are enough, or it takes too long."""
    deadline = time.monotonic() + RUN_LIMIT_SECONDS
    told = 0.0
    while True:
        starts = [json.loads(line) for line in record.read_text().splitlines()]
        enough = len(starts) >= count
        if enough or time.monotonic() > told + 3:
            told = time.monotonic()
            console.print(f"{len(starts):,} of {count:,} ran")
        if enough or time.monotonic() > deadline:
            return starts
        time.sleep(0.2)


def _tell(due: dict[str, int], starts: list[dict[str, Any]], console: Console) -> bool:
    runs = Counter(start["id"] for start in starts)
    known = [start for start in starts if start["id"] in due]
    late_ms = sorted(start["started"] * 1000 - due[start["id"]] / 1000 for start in known)
    # Times travel in milliseconds.
    early = sum(ms < -1 for ms in late_ms)
    missing, twice = len(due.keys() - runs.keys()), sum(count > 1 for count in runs.values())
    unplanned = len(runs.keys() - due.keys())
    console.print(
        f"{len(due):,} planned: {missing} missing, {twice} twice, {early} early, {unplanned} "
        f"unplanned; half of them less than {late_ms[len(late_ms) // 2]:.0f} ms late"
        if late_ms
        else "nothing ran",
        soft_wrap=True,
    )
    return bool(late_ms) and not (missing or twice or early or unplanned)


def main() -> int:
    console = Console(highlight=False, markup=False)
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        console.print("Spark needs Java 17: run scripts/setup_spark.sh")
        return 2
    asked = sys.argv[1] if len(sys.argv) > 1 else "rabbitmq"
    try:
        with tempfile.TemporaryDirectory(prefix="native-delay-spark-") as folder:
            return 0 if demonstrate(asked or "rabbitmq", Path(folder), console) else 1
    except BrokerMissing as exc:
        console.print(str(exc), soft_wrap=True)
        return 2
    except (BrokerFailed, WorkerFailed, subprocess.CalledProcessError) as exc:
        console.print(str(exc), style="red", soft_wrap=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
