"""The queues of rate-limited tasks as a table, as JSON and as metrics."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from celery_native_delay.cli.rates import shown
from celery_native_delay.metrics.collector import DelayCollector
from celery_native_delay.metrics.listening import Counts
from celery_native_delay.metrics.polling import Reading
from celery_native_delay.rates.line import RateLine
from celery_native_delay.transports.interface import Backlog

NOW_US = 1_800_000_000_000_000

LINES = (
    RateLine("api", "ada", "100/m", 3900, NOW_US + 600_000, 98, 0.98, None),
    RateLine("api", "bob", "100/m", 7, NOW_US + 28_000_000, 3, 0.03, NOW_US + 28_000_000),
    RateLine("mail", None, "5/s, burst 2", 0, None, 1, 0.2, None),
)


def test_the_table_shows_the_waiting_tasks_and_the_next_start_of_each_queue() -> None:
    text = shown(LINES, False, datetime.fromtimestamp(NOW_US / 1e6, UTC))
    assert text.splitlines() == [
        "task  key  rate          waiting  next slot  utilisation  held",
        "api   ada  100/m            3900  0.6 s      98 %",
        "api   bob  100/m               7  28 s       3 %          28 s",
        "mail       5/s, burst 2        0             20 %",
        "3,907 task(s) waiting in 3 line(s)",
    ]
    later = shown(LINES[:1], True, datetime.fromtimestamp(NOW_US / 1e6 + 5, UTC)).splitlines()
    assert "  now  " in later[1]
    assert later[2] == "3,900 task(s) waiting in 1 line(s); there are more: raise --limit"


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


def samples(lines: tuple[RateLine, ...] | None) -> Iterator[tuple[str, str, float]]:
    """Name, task and value of each metric of rate-limited tasks."""
    counts = Counts(rated=["api", "idle"])
    counts.hear({"queues": {}, "rate_starts": {"api": 2}})
    counts.hear({"queues": {}, "rate_starts": {"api": 1, "mail": 4}})
    reading = Reading(Backlog(0, 0), 0.0, 0.1, None, lines)
    poll: Any = SimpleNamespace(reading=lambda: reading)
    listener: Any = SimpleNamespace(is_connected=True)
    for metric in DelayCollector(poll, counts, listener, ["api", "idle"]).collect():
        for sample in metric.samples:
            if sample.name.startswith("celery_delay_rate_"):
                name = sample.name.removeprefix("celery_delay_rate_")
                yield name, sample.labels["task_name"], sample.value


def test_metrics_add_up_the_queues_of_a_task() -> None:
    told = {(name, task): value for name, task, value in samples(LINES)}
    assert told == {
        **{("waiting", task): n for task, n in (("api", 3907), ("idle", 0), ("mail", 0))},
        **{("lines", task): n for task, n in (("api", 2), ("idle", 0), ("mail", 1))},
        **{("lines_held", task): n for task, n in (("api", 1), ("idle", 0), ("mail", 0))},
        **{("starts_total", task): n for task, n in (("api", 3), ("idle", 0), ("mail", 4))},
    }


def test_metrics_are_absent_while_the_records_are_unreachable() -> None:
    assert {name for name, *_ in samples(None)} == {"starts_total"}
