"""Missing tasks are sent again with the same ids and due times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from celery_native_delay.spark import FanOut, read_events, reconcile
from celery_native_delay.worker.telemetry import FIELDS, SUCCESS


def test_missing_tasks_are_sent_again_under_their_ids(
    spark: Any, make_app: Callable[..., str], native_delay_redis_url: str, tmp_path: Path
) -> None:
    """Send with a ledger, telemetry without two tasks, verdicts, a fan-out of these two."""
    orders = spark.range(20).selectExpr(
        "id as order_id",
        "id % 2 as task",
        "timestamp'2026-11-20 09:00:00' as remind_at",
        "concat('a', id) as text",
    )
    app = make_app(native_delay_redis_url)
    same = {"app": app, "task": "shop.remind", "run_id": "nov", "id_cols": ["order_id", "task"]}
    sent = FanOut(orders, eta="remind_at", past="send", kwargs=["text"], **same)
    sent.send(ledger=str(tmp_path / "ledger"))
    ledger = spark.read.parquet(str(tmp_path / "ledger"))
    assert ledger.columns == ["task_id", "run_id", "task", "due", "queue", "order_id", "id_task"]
    planned = {row.order_id: row.task_id for row in ledger.collect()}
    lost = {planned.pop(3), planned.pop(17)}

    started = {"task": "shop.remind", "worker": "w", "pid": 1, "retries": 0} | dict.fromkeys(
        ("due", "started", "finished"), "2026-11-20T14:00:00.010000Z"
    )
    lines = [
        json.dumps(dict.fromkeys(FIELDS) | started | {"id": task_id, "outcome": SUCCESS})
        for task_id in planned.values()
    ]
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "telemetry/1.jsonl").write_text("\n".join(lines) + "\n")

    found = reconcile(ledger, read_events(spark, str(tmp_path / "telemetry")))
    assert {name: count for name, count in found.counts().items() if count} == {
        "ok": 18,
        "missing": 2,
    }
    again = found.missing().drop("task")
    assert {row.task_id for row in again.collect()} == lost
    repair = FanOut(again.join(orders, "order_id"), eta="due", past="send", kwargs=["text"], **same)
    assert {row.task_id for row in repair.encoded.collect()} == lost
    assert repair.plan().accepted == 2
