"""Telemetry: complete lines, one file per process and day, and no effect on tasks or other apps."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType

import pytest
from celery import Celery, signals
from celery.contrib.testing.worker import start_worker

from celery_native_delay import install
from celery_native_delay.durations import DAY_US
from celery_native_delay.message import Delayed
from celery_native_delay.worker import telemetry
from celery_native_delay.worker.telemetry import DailyFiles, waited
from tests.waiting import wait_until

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


def test_a_line_after_an_incomplete_line_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
