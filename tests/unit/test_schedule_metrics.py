"""The metrics of schedule entries."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from celery_native_delay.app.schedules import Scheduled
from celery_native_delay.metrics.collector import DelayCollector
from celery_native_delay.metrics.listening import Counts
from celery_native_delay.metrics.polling import Reading
from celery_native_delay.transports.interface import Backlog

DUE = datetime(2026, 11, 24, 2, 30, tzinfo=UTC)

NIGHTLY = Scheduled("nightly", "shop.report", "30 2 * * * UTC", None, DUE, 12, False, 0.0, "id")
LATE = NIGHTLY._replace(name='a "late"\none', late_seconds=301.5)
PAUSED = NIGHTLY._replace(name="paused", next_due=None, is_paused=True)


def samples(entries: tuple[Scheduled, ...] | None) -> dict[tuple[str, str], float]:
    """Value of each metric of schedule entries, by metric and entry."""
    reading = Reading(Backlog(0, 0), 0.0, 0.1, None, None, entries)
    poll: Any = SimpleNamespace(reading=lambda: reading)
    listener: Any = SimpleNamespace(is_connected=True)
    prefix = "celery_delay_schedule_"
    return {
        (sample.name.removeprefix(prefix), sample.labels["entry"]): sample.value
        for metric in DelayCollector(poll, Counts(), listener).collect()
        for sample in metric.samples
        if sample.name.startswith(prefix)
    }


def test_entries_have_a_due_time_and_a_lateness_unless_they_are_paused() -> None:
    assert samples((NIGHTLY, LATE, PAUSED)) == {
        ("next_due_timestamp_seconds", "nightly"): DUE.timestamp(),
        ("next_due_timestamp_seconds", LATE.name): DUE.timestamp(),
        ("late_seconds", "nightly"): 0.0,
        ("late_seconds", LATE.name): 301.5,
    }


def test_metrics_of_entries_are_absent_if_they_are_unknown() -> None:
    assert samples(None) == {}
