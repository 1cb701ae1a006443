"""Redis as the broker of real workers: killed processes, and fleets with plain workers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from time import time

import pytest

from celery_native_delay.testing import PrivateRedis, private_redis, require_redis
from pytest_celery_native_delay import installed
from tests.acceptance.worker import Fleet, fleet_on
from tests.brokers import on_one_version
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture
def fleet(store_redis: PrivateRedis, new_fleet: Callable[..., Fleet]) -> Fleet:
    """Workers and producers on Redis with a key prefix."""
    return new_fleet(store_redis.url, broker_transport_options={"global_keyprefix": "shop:"})


# ---- faults of kombu's Redis transport ---------------------------------------------------------


def test_a_countdown_longer_than_the_visibility_timeout_runs_once(fleet: Fleet) -> None:
    """Held in a worker, such a task would be delivered again after each visibility timeout.

    The case is countdown=30 with visibility_timeout=5; here 6 s and 1 s, the same ratio.
    """
    fleet.conf["broker_transport_options"] |= {
        "visibility_timeout": 1,
        "unacked_restore_interval": 0.2,
        "unacked_restore_throttle": 1,
    }
    workers = [fleet.worker(concurrency=1, wait=False) for _ in range(3)]
    for worker in workers:
        worker.wait_ready()
    note = fleet.app().tasks["note"]
    before = time()
    sent = [note.apply_async((number,), countdown=6).id for number in range(10)]
    fleet.record.wait_for_ids(sent)
    marker = note.apply_async(("after",), countdown=2)
    fleet.record.wait_for(task_id=marker.id)
    for task_id in sent:
        (run,) = fleet.record.runs(task_id=task_id)
        run.assert_on_time(before + 6, time())


# ---- mixed fleets ------------------------------------------------------------------------------


@pytest.mark.ci
def test_a_plain_worker_runs_tasks_that_another_process_promotes(fleet: Fleet) -> None:
    promote = fleet.command("delay", "promote")
    promote.wait_for_log("promoting")
    fleet.worker(installed=False)
    before = time()
    result = fleet.app().tasks["again"].apply_async((1, 0.3), countdown=1.5)
    runs = fleet.record.wait_for(2, task_id=result.id)
    runs[0].assert_on_time(before + 1.5, time())
    promote.process.send_signal(signal.SIGINT)
    assert promote.process.wait(PATIENCE_SECONDS) == 0
    assert promote.log.splitlines()[-1] == "1 message(s) promoted, 0 parked"


# ---- messages at the start of a worker ---------------------------------------------------------


@on_one_version
@pytest.mark.parametrize("place", ["broker", "store"])
def test_a_worker_logs_its_state_and_unsafe_redis_settings(
    vhost_url: str, new_fleet: Callable[..., Fleet], place: str
) -> None:
    installed(require_redis, "redis")
    config = "appendonly no\nmaxmemory 100mb\nmaxmemory-policy allkeys-lru"
    with private_redis(server="redis", config=config) as server:
        if place == "broker":
            fleet, state = new_fleet(server.url), "under celery_delay.v2: 0 waiting, 0 parked; prom"
        else:
            fleet = new_fleet(vhost_url, native_delay_store=server.url)
            state = f"{server.url} holds delayed tasks of "
        worker = fleet.worker(queues="default")
        (line,) = worker.log_lines("native delay:", "holds delayed tasks")
        assert state in line
        worker.wait_for_log("native delay: maxmemory-policy is allkeys-lru: Redis may delete")
        worker.wait_for_log("native delay: appendonly is no: a restart of Redis loses")


@pytest.mark.ci
def test_workers_survive_a_redis_restart_while_rated_tasks_wait(tmp_path: Path) -> None:
    """Rate-limited tasks are unacknowledged when the connection breaks."""
    installed(require_redis, "redis")
    rates = {"native_delay_rates": {"call_api": "5/s"}}
    with private_redis(server="redis") as server, fleet_on(server.url, tmp_path, **rates) as fleet:
        workers = [fleet.worker() for _ in range(3)]
        call_api = fleet.app().tasks["call_api"]
        for stops in range(1, 7):
            ran = len(fleet.record.runs())
            for number in range(20):
                call_api.delay("tenant", number)
            fleet.record.wait_for(ran + 2)
            server.stop()
            for worker in workers:
                worker.wait_for_log("native delay: promoting stopped", count=stops)
            server.start()
            fresh = fleet.app().tasks["note"].delay().id
            fleet.record.wait_for(task_id=fresh)
        assert [worker.process.poll() for worker in workers] == [None] * 3
        assert [worker.log_lines("Unrecoverable error") for worker in workers] == [[]] * 3
