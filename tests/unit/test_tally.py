"""The events in which workers report counts of their queues, and the metrics made of them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from celery_native_delay.metrics.listening import Counts
from celery_native_delay.worker.tally import BOUNDS, bucket, count_start


def told(*late_seconds: float, **counts: int) -> dict[str, Any]:
    """The fields of an event after serialization."""
    tally = Counter(counts)
    for seconds in late_seconds:
        count_start(tally, round(seconds * 1_000_000))
    fields: dict[str, Any] = json.loads(json.dumps(tally))
    return fields


def test_events_of_many_workers_add_up_by_queue() -> None:
    counts = Counts(["emails", "idle"])
    counts.hear({"queues": {"emails": told(-0.2, 0.1, 3, matured=3), "side": told(expired=1)}})
    counts.hear({"queues": {"emails": told(100_000, matured=2, cancelled=1)}})
    found = counts.so_far()
    late = [found["emails"][bucket(bound)] for bound in BOUNDS]
    assert late == [2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    assert found["emails"]["late_us"] == 100_003_100_000
    assert (found["emails"]["matured"], found["emails"]["cancelled"]) == (5, 1)
    assert found["side"] == {"expired": 1}
    assert found["idle"] == {}


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"queues": None},
        {"queues": {"emails": told(matured=1), "side": 3}},
        {"queues": {"emails": {"matured": -1}}},
        {"queues": {"emails": {"matured": "1"}}},
        {"queues": {"emails": {"late_1.0": {"x": 1}}}},
        {"queues": {"emails": {"late_us": float("nan")}}},
        {"queues": {"emails": {"late_us": 10**400}}},
        {"queues": {}, "rate_starts": {"shop.call_api": "many"}},
        {"queues": {}, "rate_starts": 3},
    ],
)
def test_a_malformed_event_is_logged_once_and_changes_no_count(
    event: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    counts = Counts()
    for _ in range(2):
        counts.hear(event | {"hostname": "worker@shop"})
    assert counts.so_far() == counts.starts() == {}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "worker@shop" in caplog.text
