"""Metrics, the events and lines in which workers report, and the lines of rates as text."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType

import pytest
from celery import Celery, signals
from celery.contrib.testing.worker import start_worker

from celery_native_delay import install
from celery_native_delay.app.schedules import Scheduled
from celery_native_delay.cli.rates import shown
from celery_native_delay.durations import DAY_US
from celery_native_delay.message import Delayed
from celery_native_delay.metrics.collector import DelayCollector
from celery_native_delay.metrics.threads import Counts, Reading
from celery_native_delay.rates.line import RateLine
from celery_native_delay.transports.interface import Backlog
from celery_native_delay.worker import telemetry
from celery_native_delay.worker.tally import BOUNDS, bucket, count_start
from celery_native_delay.worker.telemetry import DailyFiles, waited
from tests.waiting import wait_until

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


# ---- telemetry: complete lines, one file per process and day -------------------------------------


SIGNALS = (
    signals.task_received,
    signals.task_prerun,
    signals.task_postrun,
    signals.task_failure,
    signals.task_revoked,
)


def receivers() -> list[int]:
    """How many receivers each signal has, without those of another test that are gone."""
    return [sum(map(_lives, (each for _, each in found.receivers))) for found in SIGNALS]


def _lives(receiver: Any) -> bool:
    return not isinstance(receiver, ReferenceType) or receiver() is not None


def lines_in(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def app_with_task(name: str, **settings: Any) -> Celery:
    app = install(Celery(name, broker="memory://", set_as_current=False), **settings)

    @app.task(name=f"{name}.note", shared=False)
    def note() -> None:
        if name == "shop":
            app.tasks[f"{name}.note"].apply(task_id="eager") if note.request.id == "sent" else None

    return app


def running(app: Celery) -> Any:
    """A worker in this process; tests/conftest.py keeps Celery from configuring its logging."""
    return start_worker(app, pool="solo", perform_ping_check=False)


def test_only_tasks_that_a_broker_delivered_to_this_app_are_written(tmp_path: Path) -> None:
    import celery_native_delay.worker.bootsteps  # noqa: F401  connects receivers for all workers

    before = receivers()
    app, other = app_with_task("shop", telemetry=str(tmp_path)), app_with_task("other")
    with running(app):
        app.tasks["shop.note"].apply_async(task_id="sent")
        wait_until(lambda: len(lines_in(tmp_path)) >= 2)
        other.tasks["other.note"].apply(task_id="elsewhere")
    start, end = lines_in(tmp_path)
    assert (start["id"], start["outcome"], start["finished"]) == ("sent", None, None)
    assert (end["id"], end["outcome"], end["queue"]) == ("sent", "success", "celery")
    assert start["started"] == end["started"] <= end["finished"]
    assert receivers() == before


def test_a_line_after_a_cut_line_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = DailyFiles(tmp_path, "w")
    files.append(0, '{"a":1}')
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    files.append(0, '{"a":2}')
    monkeypatch.undo()
    files.append(0, '{"a":3}')
    (file,) = tmp_path.iterdir()
    assert file.read_text().split() == ['{"a":1}', '{"a', '{"a":3}']


def test_a_write_error_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "a file"
    taken.touch()
    monkeypatch.setattr(telemetry.logger, "propagate", True)
    files = DailyFiles(taken, "w")
    for _ in range(2):
        files.append(0, "{}")
    (warning,) = caplog.messages
    assert "telemetry is incomplete" in warning
    assert os.strerror(errno.EEXIST) in warning or os.strerror(errno.ENOTDIR) in warning


def test_a_new_day_is_a_new_file(tmp_path: Path) -> None:
    files = DailyFiles(tmp_path, "celery@a/b c")
    files.append(DAY_US - 1, "1")
    files.append(DAY_US, "2")
    pid = os.getpid()
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        f"1970-01-01_celery@a_b_c_{pid}.jsonl": "1\n",
        f"1970-01-02_celery@a_b_c_{pid}.jsonl": "2\n",
    }


ETA = "1970-01-01T00:00:01+00:00"
WAITED = Delayed("d", 1_000_000, "", "celery")


@pytest.mark.parametrize(
    ("eta", "attributes", "expected"),
    [
        (ETA, {"native_delay": WAITED}, True),
        (None, {"native_delay": WAITED, "kept_eta": ETA}, True),  # it is hidden from Celery
        (ETA, {"native_delay": None}, False),
        # The worker held the task, so it was sent in time by any producer.
        ("1970-01-01T00:01:00+00:00", {"native_delay": None}, None),
        # The store did not answer, so the task was put back.
        (ETA, {"native_delay": WAITED._replace(due_us=1_500_000)}, None),
        (None, {"native_delay": None}, None),
        ("tomorrow", {"native_delay": None}, None),
        (ETA, {}, None),  # another transport
    ],
)
def test_whether_a_message_waited_for_its_due_time(
    eta: str | None, attributes: dict[str, Any], expected: bool | None
) -> None:
    message = SimpleNamespace(headers={"task": "note", "eta": eta}, **attributes)
    assert waited(message, now_ms=2000) is expected
