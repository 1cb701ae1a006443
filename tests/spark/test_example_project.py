"""The example project's Spark pipeline, as far as it goes without a broker."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow.parquet as pq

from example_project import orders
from example_project.spark_demo import SPEED, reminders


def test_the_data_set_is_what_its_generator_makes() -> None:
    assert pq.read_table(orders.PATH).to_pylist() == orders.orders()


def test_everybody_who_wants_a_reminder_gets_one_in_time(spark: Any) -> None:
    """Bad rows stay behind, each with its reason; zones and the demo's clock are minded."""
    start = datetime.now(UTC) + timedelta(seconds=25)
    fan_out = reminders(spark.read.parquet(str(orders.PATH)), start)
    rows = fan_out.encoded.collect()
    wanted = [row for row in orders.orders() if not row["opted_out"]]
    assert len(rows) == len(wanted)
    bad = [row for row in rows if row.error]
    assert len(bad) == 8
    for row in (row for row in rows if not row.error):
        at = datetime.fromisoformat(row.eta)
        delivered = orders.utc_of(row.row.delivery, row.row.zone)
        assert abs((at - start) * SPEED - (delivered - orders.DAY)) < timedelta(seconds=1)
        assert json.loads(row.body)[0][0] == row.row.email
