"""Remind a day's customers from Spark on a private broker, and prove that each customer was
reminded.

Run it with `make demo-spark` or `python -m example_project.spark_demo [BROKER]`. The function
`reminders` is the Spark pipeline. All other functions start a broker, a worker and a local Spark,
and show what happens. A day of the data passes in twenty seconds.

The exit status is 0 if every task ran once and not early. The exit status is 1 if not, and 2 if
there is no broker or no Java.
"""

import os
import shutil
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from rich import box
from rich.console import Console
from rich.table import Table

from celery_native_delay.spark import (
    FanOut,
    FanOutResult,
    Plan,
    Reconciliation,
    read_events,
    reconcile,
)
from example_project.demo import main, running_worker
from example_project.demo_broker import REPOSITORY, demo_broker
from example_project.orders import DAY, PATH

#: Seconds of the data's day that pass in one second of the demo.
SPEED = 86_400 / 20

#: A rehearsal of the plan measures the speed of this machine. The jobs for plan and sending
#: may take this many times longer than the rehearsal. Sending has at least the rate below.
REHEARSALS = 2
SLOWEST_PER_SECOND = 1_000
SPARE_SECONDS = 5

#: The demo stops waiting this many seconds after the last due time.
RUN_LIMIT_SECONDS = 90


def reminders(orders: DataFrame, start: datetime) -> FanOut:
    """Build the tasks: an e-mail at delivery time to each customer who wants a reminder.

    *start* is the time at which the data's day begins in the demo. A real pipeline would use the
    times unchanged, with eta="delivery" and eta_zone=col("zone").
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


def lead(rehearsal_seconds: float, count: int) -> timedelta:
    """Return the time until the first of *count* reminders is due: enough to plan and send all
    reminders.

    *rehearsal_seconds* is the time that planning took in a rehearsal.
    """
    sending_seconds = count / SLOWEST_PER_SECOND
    return timedelta(seconds=SPARE_SECONDS + REHEARSALS * rehearsal_seconds + sending_seconds)


def session_of(folder: Path, broker_url: str) -> SparkSession:
    """Return a Spark session with two slots on this machine, or on the cluster SPARK_MASTER.

    The cluster needs the same Python packages. The app reads its broker from an environment
    variable.
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
    """Run the whole demo, and return True if every task is ok and no row is missing."""
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
            orders = spark.read.parquet(str(PATH))
            begun = time.monotonic()
            count = reminders(orders, datetime.now(UTC) + timedelta(days=1)).plan().accepted
            wait = lead(time.monotonic() - begun, count)
            console.print(f"the first reminder is due in {wait.total_seconds():.0f} s")
            fan_out = reminders(orders, datetime.now(UTC) + wait)
            console.rule("plan")
            plan = fan_out.plan()
            console.print(str(plan), soft_wrap=True)
            console.rule("send")
            result = fan_out.send(ledger=str(ledger))
            console.print(str(result), soft_wrap=True)
            console.rule("run")
            _wait_for(plan, record, console)
        console.rule("reconcile")
        found = reconcile(
            spark.read.parquet(str(ledger)),
            read_events(spark, str(telemetry)),
            as_of=datetime.now(UTC),
            grace_seconds=0,
        ).stored(str(folder / "verdicts"))
        return tell(found, result, console)


def _wait_for(plan: Plan, record: Path, console: Console) -> None:
    """Wait until all tasks of *plan* have started, or the time limit."""
    count = plan.accepted
    now = datetime.now(UTC)
    until_last = max(plan.last_due or now, now) - now
    deadline = time.monotonic() + until_last.total_seconds() + RUN_LIMIT_SECONDS
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


def tell(found: Reconciliation, result: FanOutResult, console: Console) -> bool:
    """Show the result of every row, and return True if every task is ok and no row is missing."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what became of it", no_wrap=True)
    for heading in ("rows", "late by p50", "p99", "at most"):
        table.add_column(heading, justify="right")
    ended = tally(found)
    for one in ended:
        sent = ", sent after due" if one["sent_after_due"] else ""
        late = [one["late_max"] and f"{one[name]:,.3f} s" for name in LATENESS]
        table.add_row(
            f"{one['verdict']}{sent}", f"{one['tasks']:,}", *(text or "" for text in late)
        )
    table.add_row("rejected: see the plan", f"{result.rejected:,}")
    told = sum(one["tasks"] for one in ended) + result.rejected
    table.add_section()
    table.add_row("together", f"{told:,} of {result.rows:,}")
    console.print(table)
    if result.sent_after_due:
        console.print(
            f"{result.sent_after_due:,} reminders were sent after they were due: this machine was "
            "slower than the rehearsal; they say nothing about the broker"
        )
    return {one["verdict"] for one in ended} == {"ok"} and told == result.rows


#: Columns of the seconds between due time and start.
LATENESS = ("late_p50", "late_p99", "late_max")


def tally(found: Reconciliation) -> list[Any]:
    """Return the number of tasks and their lateness by verdict.

    Tasks that were sent after their due time count separately.
    """
    late = f.percentile_approx("late_seconds", [0.5, 0.99])
    groups = found.verdicts.groupBy(
        "verdict", f.coalesce("sent_after_due", f.lit(False)).alias("sent_after_due")
    ).agg(f.count("*").alias("tasks"), late.alias("late"), f.max("late_seconds").alias("late_max"))
    columns = ("verdict", "sent_after_due", "tasks", "late_max")
    quantiles = (f.col("late")[0].alias("late_p50"), f.col("late")[1].alias("late_p99"))
    return groups.select(*columns, *quantiles).orderBy("verdict", "sent_after_due").collect()


if __name__ == "__main__":
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        print("Spark needs Java 17: run scripts/setup_spark.sh")
        sys.exit(2)
    sys.exit(main(demonstrate))
