"""The runs of Spark fan-outs in real workers: counted, cancelled and rescheduled as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from celery import Celery

from celery_native_delay import CannotDelay, Delay, DelayTooLong, InvalidFanOut, Run
from celery_native_delay.app.runs import close_run, open_run, runs_of
from celery_native_delay.bulk.batch import Bulk
from celery_native_delay.now import time_ns
from celery_native_delay.records.waiting import RUN
from tests.acceptance.worker import Fleet
from tests.brokers import ON_SYSTEM, in_ci
from tests.waiting import wait_until


@pytest.fixture(params=["redis", in_ci("in broker"), in_ci("in store")])
def where(request: pytest.FixtureRequest) -> str:
    """The place where the tasks of a run wait: a Redis broker, or RabbitMQ, or SQLite beside it."""
    return str(request.param)


@pytest.fixture
def fleet(where: str, fleet_at: Callable[..., Fleet]) -> Fleet:
    conf = {"native_delay_store_tasks": ["nothing"]} if where == "in broker" else {}
    return fleet_at("redis" if where == "redis" else f"{ON_SYSTEM.id}-sqlite", **conf)


def send(app: Celery, run_id: str, count: int, *, countdown: float, job: str = "job 1") -> None:
    assert open_run(app, run_id, "note", time_ns() // 1000, job) is not None
    with Bulk(app, headers={RUN: run_id}) as batch:
        for number in range(count):
            batch.send("note", (run_id,), task_id=f"{run_id}-{number}", countdown=countdown)
    last_us = time_ns() // 1000 + round(countdown * 1e6)
    close_run(app, run_id, {"rows": count + 1, "sent": count, "rejected": 1}, last_us)


def test_a_run_is_counted_listed_and_cancelled(fleet: Fleet, where: str) -> None:
    """Workers announce its tasks as revoked; those of a run with a similar name run."""
    app = fleet.app()
    send(app, "night", 5, countdown=3)
    send(app, "nightly", 8, countdown=3)
    run = Run("nightly", app=app)
    status = run.status()
    assert (status.planned, status.sent, status.rejected, status.tries) == (9, 8, 1, 1)
    waiting = None if where == "in broker" else 8
    assert (status.waiting, status.left) == (waiting, None if waiting is None else 0)
    assert {each.run_id for each in runs_of(app, 10)} == {"night", "nightly"}
    assert json.loads(json.dumps(status.as_json()))["run_id"] == "nightly"
    if waiting:
        assert Delay(app).count("run:nightly") == 8
    run.cancel()
    assert run.status().cancelled
    with pytest.raises(InvalidFanOut, match="not cancelled, got 'nightly': choose another run_id"):
        open_run(app, "nightly", "note", 0, "job 2")
    with pytest.raises(InvalidFanOut, match="was sent and not yet forgotten, got 'nihgtly'"):
        Run("nihgtly", app=app).cancel()
    worker = fleet.worker(concurrency=1)
    fleet.record.wait_for(5)
    wait_until(lambda: len(worker.log_lines("Discarding revoked task")) == 8)
    worker.stop()
    assert {each.args[0] for each in fleet.record.runs()} == {"night"}


def test_each_task_of_a_run_that_is_sent_again_counts_once(fleet: Fleet, where: str) -> None:
    app = fleet.app()
    for job, count in (("job 1", 4), ("job 2", 6)):
        send(app, "again", count, countdown=900, job=job)
    status = Run("again", app=app).status()
    waiting, left = (None, None) if where == "in broker" else (6, 0)
    assert (status.tries, status.sent, status.waiting, status.left) == (2, 6, waiting, left)


def test_a_run_is_rescheduled_as_a_whole(fleet: Fleet, where: str) -> None:
    """Each task by the same time; a repeated try moves its tasks, too."""
    app = fleet.app()
    send(app, "later", 3, countdown=900)
    run = Run("later", app=app)
    if where == "in broker":
        with pytest.raises(CannotDelay, match="wait in the broker, which cannot change them"):
            run.reschedule(by=60)
        return
    with pytest.raises(DelayTooLong):
        run.reschedule(by=1e9)
    before = [task.due for task in Delay(app).ls("run:later")]
    assert run.reschedule(by=60) == 3
    after = [task.due for task in Delay(app).ls("run:later")]
    assert [round((b - a).total_seconds()) for a, b in zip(before, after, strict=True)] == [60] * 3
    assert run.reschedule(by=-2000) == 3
    again = open_run(app, "later", "note", 0, "job 2")
    assert again is not None
    assert (again.tries, again.moved_us) == (2, -1_940_000_000)
    fleet.worker(concurrency=1)
    fleet.record.wait_for(3)
    wait_until(lambda: (run.status().waiting, run.status().left) == (0, 3))
