"""Telemetry: the lines that a real worker writes, also about tasks whose process is killed."""

from __future__ import annotations

import json
import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest

from celery_native_delay.testing import PrivateRedis
from tests.acceptance.worker import EARLY_SECONDS, LATE_SECONDS, Fleet, fleet_on
from tests.brokers import in_ci, on_one_version
from tests.waiting import wait_until


class Events:
    """Reads the lines in a folder of telemetry."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self, task_id: str) -> list[dict[str, Any]]:
        """The lines of one task, in order of time."""
        found = [
            json.loads(line)
            for file in self.folder.glob("*.jsonl")
            # A running worker may have written only half of the last line.
            for line in file.read_text().split("\n")[:-1]
        ]
        mine = [line for line in found if line["id"] == task_id]
        return sorted(mine, key=lambda line: line["finished"] or line["started"])

    def wait_for(self, task_id: str, *outcomes: str | None) -> list[dict[str, Any]]:
        """Wait for the lines of one task, as many as *outcomes*, and check their outcomes.

        The outcome None is the line about a start.
        """

        wait_until(lambda: len(self.lines(task_id)) >= len(outcomes))
        lines = self.lines(task_id)
        # The next attempt may start in another process before this one has ended with a retry.
        lines.sort(key=lambda line: (line["retries"], line["outcome"] is not None))
        assert tuple(line["outcome"] for line in lines) == outcomes
        return lines

    def wait_for_end(self, task_id: str, outcome: str) -> dict[str, Any]:
        """The line about a killed task; the task may have written the outcome "lost" before."""

        def ended() -> dict[str, Any] | None:
            found = [line for line in self.lines(task_id) if line["outcome"] == outcome]
            return found[0] if found else None

        line = wait_until(ended)
        outcomes = [line["outcome"] for line in self.lines(task_id)]
        assert outcomes[0] is None
        assert set(outcomes[1:]) <= {"lost", outcome}
        return line


@on_one_version
def test_every_outcome_of_a_task_is_written(fleet: Fleet, tmp_path: Path) -> None:
    events = Events(tmp_path / "telemetry")
    worker = fleet.worker(concurrency=2, native_delay_telemetry=str(events.folder))
    app = fleet.app()
    due = datetime.now(UTC) + timedelta(seconds=1.5)

    def send(name: str, *args: Any, **options: Any) -> str:
        return str(app.send_task(name, args, **options).id)

    on_time = send("note", "x", eta=due, exchange="shop", routing_key="orders.new")
    retried = send("again", 2, 0.3, countdown=0.5)
    failed = send("hold", "no number", countdown=0.5)
    expired = send("note", "x", countdown=1, expires=0.1)
    timed_out = send("hold", 60, time_limit=1, queue="side")
    sent_late = send("note", "x", eta=datetime.now(UTC) - timedelta(seconds=5))
    at_once = send("note", "x")

    start, end = events.wait_for(on_time, None, "success")
    for line in (start, end):
        assert (line["task"], line["worker"], line["queue"]) == ("note", worker.name, "orders")
        assert (line["root_id"], line["retries"]) == (on_time, 0)
        assert datetime.fromisoformat(line["due"]) == due
        assert line["waited"] is True
    assert start["started"] == end["started"] < end["finished"]
    assert start["pid"] == end["pid"] != worker.process.pid
    late = datetime.fromisoformat(start["started"]) - due
    assert late.total_seconds() >= -EARLY_SECONDS

    for task_id, waited in ((sent_late, False), (at_once, None)):
        lines = events.wait_for(task_id, None, "success")
        assert [line["waited"] for line in lines] == [waited] * 2

    attempts = events.wait_for(retried, None, "retry", None, "retry", None, "success")
    assert {line["waited"] for line in attempts} == {True}
    assert [line["retries"] for line in attempts] == [0, 0, 1, 1, 2, 2]
    for ended, started in zip(attempts[1::2], attempts[2::2], strict=False):
        comes_again = datetime.fromisoformat(ended["retry_due"])
        told = datetime.fromisoformat(started["due"])
        # Counted from the end of the attempt, which is after the retry was published.
        assert comes_again >= told - timedelta(seconds=EARLY_SECONDS)
        assert comes_again < told + timedelta(seconds=LATE_SECONDS)

    events.wait_for(failed, None, "failure")
    (line,) = events.wait_for(expired, "expired")
    assert line["started"] is None

    events.wait_for_end(timed_out, "timeout")
    terminated = send("hold", 60)
    events.wait_for(terminated, None)
    app.control.revoke(terminated, terminate=True)
    line = events.wait_for_end(terminated, "terminated")
    assert (line["started"], line["queue"]) == (None, "default")

    killed = send("hold", 60)
    (line,) = events.wait_for(killed, None)
    os.kill(line["pid"], signal.SIGKILL)
    _, lost = events.wait_for(killed, None, "lost")
    assert lost["started"] is None
    assert (lost["retries"], lost["queue"]) in ((0, "default"), (None, None))  # before Celery 5.7

    running = send("hold", 60)
    events.wait_for(running, None)
    worker.kill()
    events.wait_for(running, None)
    assert [run.headers for run in fleet.record.runs()] == [None] * 11  # tasks get no error
    for file in events.folder.iterdir():
        assert file.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
@pytest.mark.parametrize("pool", ["prefork", *map(in_ci, ("threads", "solo", "gevent"))])
def test_every_pool_writes_the_lines_of_all_its_tasks(
    empty_redis: PrivateRedis,
    tmp_path: Path,
    pool: Literal["prefork", "threads", "solo", "gevent"],
) -> None:
    events = Events(tmp_path / "telemetry")
    with fleet_on(empty_redis.url, tmp_path) as fleet:
        worker = fleet.worker(pool=pool, native_delay_telemetry=str(events.folder))
        app = fleet.app()
        notes = [app.send_task("note", (n,), countdown=0.2, queue="side").id for n in range(20)]
        for task_id in notes:
            start, end = events.wait_for(task_id, None, "success")
            assert (start["queue"], end["queue"]) == ("side", "side")
        last = app.send_task("hold", (1,)).id
        events.wait_for(last, None)
        worker.stop()
        events.wait_for(last, None, "success")
        processes = {line["pid"] for task_id in notes for line in events.lines(task_id)}
        assert (processes == {worker.process.pid}) == (pool != "prefork")
        assert len(list(events.folder.iterdir())) <= 3
        assert worker.log_lines("Traceback") == []
