"""Fenced runs with real workers: which of the sent tasks run, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any

import pytest

from celery_native_delay.app.installation import installed, records_location
from celery_native_delay.bulk import bulk
from celery_native_delay.fence.in_records import Runs
from celery_native_delay.fence.run import ABORTED, ALL, COMMITTED, HEADER, OPEN, Record, Stamp
from celery_native_delay.records.opened import records_at
from celery_native_delay.testing import PrivateRedis, private_redis
from tests.acceptance.worker import Fleet, fleet_on
from tests.brokers import on_one_version
from tests.traffic import beside
from tests.waiting import wait_until

#: Few and short levels, which are quick to declare.
SETTINGS = {
    "native_delay_namespace": "tests",
    "native_delay_levels": 12,
    "native_delay_resolution": 0.02,
}

TASKS = 20
"""Of every run."""


@pytest.mark.ci
@pytest.mark.parametrize("kept_in", ["redis", "sqlite"])
@on_one_version
def test_tasks_of_a_fenced_run_on_rabbitmq(
    vhost_url: str, native_delay_redis_url: str, tmp_path: Path, kept_in: str
) -> None:
    url = native_delay_redis_url if kept_in == "redis" else f"sqlite:///{tmp_path}/records.db"
    check_what_runs(vhost_url, tmp_path, pool="prefork", native_delay_records=url)


@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
def test_tasks_of_a_fenced_run_on_redis(empty_redis: PrivateRedis, tmp_path: Path) -> None:
    """The run is recorded on the broker; prefork and gevent pools."""
    check_what_runs(empty_redis.url, tmp_path, pool="gevent")


@contextmanager
def runs_of(fleet: Fleet) -> Iterator[Runs]:
    app = fleet.app()
    place = records_location(app, installed(app).settings())
    assert place is not None
    records = records_at(*place)
    yield Runs(records)
    records.close()


def ids(run: str) -> list[str]:
    return [f"{run}-{number}" for number in range(TASKS)]


def send(fleet: Fleet, run: str, *attempts: str, queue: str = "default") -> None:
    """Send the tasks of *run* once per attempt at its only partition, with the same ids."""
    for attempt in attempts:
        headers = {HEADER: str(Stamp(run, 0, attempt))} if attempt else {}
        with bulk(fleet.app(), headers=headers) as batch:
            for number, task_id in enumerate(ids(run)):
                batch.send("note", (number,), task_id=task_id, countdown=0.5, queue=queue)


def begin(runs: Runs, run: str, *, within_seconds: float = 600) -> None:
    now = time()
    runs.open(run, Record(OPEN, now, deadline=now + within_seconds), kept_seconds=600, job="j")


def seal(runs: Runs, run: str, state: str, winner: str | None = None) -> None:
    winners = {} if winner is None else {"0": winner}
    record = Record(state, time(), winners=winners, by="the driver")
    assert runs.seal(run, record, kept_seconds=600).state == state


def check_what_runs(broker_url: str, folder: Path, *, pool: Any, **records: str) -> None:
    events: list[Any] = []
    with fleet_on(broker_url, folder, **SETTINGS, **records) as fleet, runs_of(fleet) as runs:
        worker = fleet.worker(
            pool=pool,
            queues="default",
            log_level="DEBUG",
            more=("-E",),
        )
        strict = fleet.worker(queues="side", native_delay_fence_policy="drop")
        app = fleet.app()
        connection = app.connection_for_read()
        receiver = app.events.Receiver(connection, {"native_delay-fenced": events.append})

        def stop() -> None:
            receiver.should_stop = True

        with beside(lambda: receiver.capture(wakeup=False), stop=stop):
            begin(runs, "held")
            send(fleet, "held", "0-a", "1-b")
            begin(runs, "won")
            send(fleet, "won", "0-a", "1-b")
            seal(runs, "won", COMMITTED, winner="1-b")
            begin(runs, "aborted")
            send(fleet, "aborted", "0-a")
            seal(runs, "aborted", ABORTED)
            begin(runs, "dead", within_seconds=2)
            send(fleet, "dead", "0-a", "1-b")
            begin(runs, "strict", within_seconds=2)
            send(fleet, "strict", "0-a", queue="side")
            send(fleet, "lost", "0-a")
            send(fleet, "plain", "")
            worker.wait_for_log("waits for its run to be sealed", "held-", count=2 * TASKS)
            assert fleet.record.runs(task_id="held-0") == []
            seal(runs, "held", COMMITTED, winner="0-a")
            fleet.record.wait_for(6 * TASKS)
            worker.wait_for_log("is dropped: attempt 0-a at partition 0 of run won", count=TASKS)
            worker.wait_for_log("is dropped: attempt 1-b at partition 0 of run held", count=TASKS)
            worker.wait_for_log("is dropped: run aborted was aborted", count=TASKS)
            strict.wait_for_log("is dropped: run strict was aborted", count=TASKS)

            wait_until(lambda: len(events) >= 3 * TASKS)
        connection.close()
        ran = fleet.record.runs()
        times = {"won": 1, "held": 1, "dead": 2, "lost": 1, "plain": 1}
        assert Counter(run.id for run in ran) == {
            each: count for run, count in times.items() for each in ids(run)
        }
        assert {run.retries for run in ran} == {0}
        assert {str(run.headers) for run in ran} == {"None"}, "a task sees nothing of it"
        for run in ran:
            assert run.due is not None
            run.assert_on_time(run.due, run.due + 60)
        assert worker.log_lines("run dead was not sealed in time", "all of its tasks run")
        assert strict.log_lines("run strict was not sealed in time", "dropped")
        assert worker.log_lines("the record of run lost is lost", "all of its tasks run")
        found = runs.load(["dead", "strict", "lost", "won"])
        assert [record.state for record in found if record] == [ALL, ABORTED, ALL, COMMITTED]
        assert [record.by for record in found if record][:2] == [worker.name, strict.name]
        assert {event["reason"] for event in events} == {"lost", "aborted"}
        assert worker.log_lines("Traceback") == strict.log_lines("Traceback") == []


@pytest.mark.ci
@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
def test_fenced_tasks_wait_while_the_records_are_unreachable_and_other_tasks_run(
    empty_redis: PrivateRedis, tmp_path: Path
) -> None:
    """Fenced tasks wait in the broker, so the worker's whole prefetch is free for other tasks."""
    with (
        private_redis() as server,
        fleet_on(empty_redis.url, tmp_path, **SETTINGS, native_delay_records=server.url) as fleet,
        runs_of(fleet) as runs,
    ):
        worker = fleet.worker(queues="default")
        begin(runs, "run")
        server.stop()
        send(fleet, "run", "0-a", "1-b")
        worker.wait_for_log("tasks of fenced runs wait, as")
        send(fleet, "plain", "")
        fleet.record.wait_for_ids(ids("plain"))
        assert {run.id for run in fleet.record.runs()} == set(ids("plain"))
        server.start()
        seal(runs, "run", COMMITTED, winner="1-b")
        fleet.record.wait_for_ids(ids("run"))
        worker.wait_for_log("is dropped: attempt 0-a at partition 0 of run run", count=TASKS)
        assert Counter(run.id for run in fleet.record.runs()).most_common(1)[0][1] == 1
