"""Metrics, the events in which workers report their counts, and the lines of rates as text."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from celery_native_delay.app.schedules import Scheduled
from celery_native_delay.cli.rates import shown
from celery_native_delay.metrics.collector import DelayCollector
from celery_native_delay.metrics.threads import Counts, Reading
from celery_native_delay.rates.line import RateLine
from celery_native_delay.transports.interface import Backlog
from celery_native_delay.worker.tally import BOUNDS, bucket, count_start

NOW_US = 1_800_000_000_000_000

LINES = (
    RateLine("api", "ada", "100/m", 3900, NOW_US + 600_000, 98, 0.98, None),
    RateLine("api", "bob", "100/m", 7, NOW_US + 28_000_000, 3, 0.03, NOW_US + 28_000_000),
    RateLine("mail", None, "5/s, burst 2", 0, None, 1, 0.2, None),
)


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
        {"queues": {"emails": told(matured=1), "side": 3}},
        {"queues": {"emails": {"matured": -1}}},
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


# ---- rate limits and schedule entries ------------------------------------------------------------


def samples(prefix: str, counts: Counts, **seen: Any) -> dict[tuple[str, str], float]:
    """The value of each metric with this prefix, by the rest of its name and its only label."""
    reading = Reading(Backlog(0, 0), 0.0, 0.1, None, **seen)
    poll: Any = SimpleNamespace(reading=lambda: reading)
    listener: Any = SimpleNamespace(is_connected=True)
    found = {}
    for metric in DelayCollector(poll, counts, listener, ["api", "idle"]).collect():
        for sample in metric.samples:
            if sample.name.startswith(prefix):
                (label,) = sample.labels.values()
                found[sample.name.removeprefix(prefix), label] = sample.value
    return found


def test_metrics_add_up_the_queues_of_a_rated_task() -> None:
    counts = Counts(rated=["api", "idle"])
    counts.hear({"queues": {}, "rate_starts": {"api": 2}})
    counts.hear({"queues": {}, "rate_starts": {"api": 1, "mail": 4}})
    starts = {("starts_total", task): n for task, n in (("api", 3), ("idle", 0), ("mail", 4))}
    assert samples("celery_delay_rate_", counts, lines=LINES) == starts | {
        **{("waiting", task): n for task, n in (("api", 3907), ("idle", 0), ("mail", 0))},
        **{("lines", task): n for task, n in (("api", 2), ("idle", 0), ("mail", 1))},
        **{("lines_held", task): n for task, n in (("api", 1), ("idle", 0), ("mail", 0))},
    }
    unreachable = samples("celery_delay_rate_", counts, lines=None)
    assert unreachable == starts


def test_entries_have_a_due_time_and_a_lateness_unless_they_are_paused_or_unknown() -> None:
    due = datetime(2026, 11, 24, 2, 30, tzinfo=UTC)
    nightly = Scheduled("nightly", "shop.report", "30 2 * * * UTC", None, due, 12, False, 0.0, "id")
    late = nightly._replace(name='a "late"\none', late_seconds=301.5)
    paused = nightly._replace(name="paused", next_due=None, is_paused=True)
    entries = (nightly, late, paused)
    assert samples("celery_delay_schedule_", Counts(), lines=None, entries=entries) == {
        ("next_due_timestamp_seconds", "nightly"): due.timestamp(),
        ("next_due_timestamp_seconds", late.name): due.timestamp(),
        ("late_seconds", "nightly"): 0.0,
        ("late_seconds", late.name): 301.5,
    }
    assert samples("celery_delay_schedule_", Counts(), lines=None, entries=None) == {}


def test_the_table_says_if_a_task_may_start_now_and_if_there_are_more_lines() -> None:
    later = datetime.fromtimestamp(NOW_US / 1e6 + 5, UTC)
    *_, row, end = shown(LINES[:1], True, later).splitlines()
    assert "  now  " in row
    assert end == "3,900 task(s) waiting in 1 line(s); there are more: raise --limit"


def test_json_has_times_in_iso_8601_or_null() -> None:
    assert LINES[1].as_json() == {
        "task": "api",
        "key": "bob",
        "rate": "100/m",
        "waiting": 7,
        "next_slot": "2027-01-15T08:00:28.000+00:00",
        "starts_last_period": 3,
        "utilisation": 0.03,
        "held_until": "2027-01-15T08:00:28.000+00:00",
        "overridden": False,
    }
    assert LINES[2].as_json()["next_slot"] is LINES[2].as_json()["key"] is None
