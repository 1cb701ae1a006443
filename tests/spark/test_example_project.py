"""The Spark pipeline of the example project, without a broker."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow.parquet as pq
from rich.console import Console

from celery_native_delay.spark import FanOutResult, Receipt, reconcile, task_id_of
from celery_native_delay.spark.options import EPOCH
from celery_native_delay.worker.telemetry import FIELDS
from example_project import orders
from example_project.spark_demo import SPEED, lead, reminders, tell


def test_the_data_set_is_the_output_of_its_generator() -> None:
    assert pq.read_table(orders.PATH).to_pylist() == orders.orders()


def test_each_valid_order_gets_a_reminder_at_its_due_time(spark: Any) -> None:
    """Bad rows are rejected with a reason; time zones and the demo's clock are respected."""
    start = datetime.now(UTC) + timedelta(seconds=25)
    fan_out = reminders(spark.read.parquet(str(orders.PATH)), start)
    rows = fan_out.encoded.collect()
    wanted = [row for row in orders.orders() if not row["opted_out"]]
    assert len(rows) == len(wanted)
    bad = [row for row in rows if row.error]
    assert len(bad) == 8
    run, task = fan_out.run_id, "example_project.tasks.send_email"
    by_id = {task_id_of(run, task, order["order_id"]): order for order in wanted}
    for row in (row for row in rows if not row.error):
        order = by_id[row.task_id]
        at = EPOCH + timedelta(microseconds=row.due_us)
        delivered = orders.utc_of(order["delivery"], order["zone"])
        assert abs((at - start) * SPEED - (delivered - orders.DAY)) < timedelta(seconds=1)
        assert json.loads(row.body)[0][0] == order["email"]


def test_the_demo_plans_more_time_on_a_slower_machine() -> None:
    """Plan, ledger and sending must end before the first due time."""
    for planning_seconds in (0.5, 5.0, 50.0):
        assert lead(planning_seconds, 5_000).total_seconds() > 2 * planning_seconds + 5
    assert lead(1.0, 100_000) > lead(1.0, 1_000)


@pytest.mark.parametrize("forgotten", [0, 1])
def test_the_demos_table_counts_all_rows(
    spark: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, forgotten: int
) -> None:
    """Also rejected rows, and apart from others those sent after they were due."""
    monkeypatch.chdir(tmp_path)
    due = datetime(2026, 11, 20, 9, 30, tzinfo=UTC)
    line = {"task": "send_email", "queue": "emails", "retries": 0, "worker": "w", "pid": 1}
    rows = []
    for name, waited, late_seconds in (("a", True, 0.25), ("b", False, 60)):
        start = due + timedelta(seconds=late_seconds)
        ran = {"id": name, "started": start, "finished": start, "outcome": "success"}
        rows.append(tuple((line | ran | {"waited": waited}).get(key) for key in FIELDS))
    schema = ", ".join(f"{key} {kind}" for key, kind in FIELDS.items())
    ledger = spark.createDataFrame([("a", due), ("b", due)], "task_id string, due timestamp")
    found = reconcile(ledger, spark.createDataFrame(rows, schema))
    receipt = Receipt(0, 0, rows=5 + forgotten, sent=2, confirmed=2, sent_after_due=1)
    receipt.rejected = Counter({"the due time has passed": 3})
    console = Console(width=100, record=True, quiet=False)
    assert tell(found, FanOutResult("r", 1.0, [receipt], []), console) is not bool(forgotten)
    shown = [line.split() for line in console.export_text().splitlines()]
    assert ["ok", "1", "0.250", "s", "0.250", "s", "0.250", "s"] in shown
    late = "ok, sent after due 1 60.000 s 60.000 s 60.000 s"
    assert late.split() in shown
    assert ["rejected:", "see", "the", "plan", "3"] in shown
    assert f"together 5 of {5 + forgotten}".split() in shown
