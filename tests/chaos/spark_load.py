"""Spark as a producer: one small ``FanOut`` after the other, noted as tests/chaos/load.py does.

Run as a process of its own by tests/chaos/run.py.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from time import sleep, time
from typing import Any

import click
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from celery_native_delay.spark import FanOut, task_id_of
from tests.chaos.load import ROUTES, TASK, Notebook

ROWS = 500
PAUSE_SECONDS = 15.0
SHORTEST_SECONDS = 5.0
"""So long a job may take, on a quiet machine; what is due sooner is sent late."""


def fan_out(spark: Any, notebook: Notebook, chance: Random, *, longest_seconds: float) -> None:
    """Send ROWS tasks to the app of this process' environment, in one job."""
    run_id, now = f"chaos-{chance.getrandbits(64):x}", time()
    rows = []
    for number in range(ROWS):
        due = now + chance.triangular(SHORTEST_SECONDS, longest_seconds, SHORTEST_SECONDS)
        rows.append((number, round(due * 1000) * 1000, chance.choice(list(ROUTES))))
    ids = [task_id_of(run_id, TASK, number) for number, _, _ in rows]
    for task_id, (_, due_us, queue) in zip(ids, rows, strict=True):
        notebook.note("sending", task_id, queue=queue, due=due_us / 1_000_000)
    table = spark.createDataFrame(rows, "number long, due_us long, queue string")
    job = FanOut(
        table.withColumn("due", f.timestamp_micros("due_us")),
        app="tests.acceptance.apps.installed:app",
        task=TASK,
        eta="due",
        queue="queue",
        id_cols=["number"],
        run_id=run_id,
        past="send",
    )
    try:
        unconfirmed = {failure.task_id: failure for failure in job.send(check=False).failures}
    except Exception as exc:
        for task_id in ids:
            notebook.note("failed", task_id, error=f"{type(exc).__name__}: {exc}"[:200])
        return
    for task_id in ids:
        if failure := unconfirmed.get(task_id):
            notebook.note("failed", task_id, error=f"{failure.outcome}: {failure.reason}"[:200])
        else:
            notebook.note("confirmed", task_id)


@click.command()
@click.option("--seed", type=int, required=True)
@click.option("--longest", type=float, required=True)
@click.option("--until", type=float, required=True)
@click.option("--notes", type=click.Path(path_type=Path), required=True)
def main(seed: int, longest: float, until: float, notes: Path) -> None:
    """Start one job after the other, until that Unix time."""
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.sql.shuffle.partitions": "1",
        "spark.ui.enabled": "false",
    }
    builder = SparkSession.builder.master("local[2]").appName("chaos")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    notebook, chance = Notebook(notes), Random(seed)
    while time() < until:
        fan_out(spark, notebook, chance, longest_seconds=longest)
        sleep(min(PAUSE_SECONDS, max(until - time(), 0)))


if __name__ == "__main__":
    main()
