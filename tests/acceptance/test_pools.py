"""All four pools run delayed tasks, retries and early tasks, and hold none in the worker."""

from __future__ import annotations

import json
from time import time
from typing import Literal

import pytest

from celery_native_delay.testing import PrivateRabbitMQ
from tests.acceptance.worker import Fleet
from tests.brokers import in_ci, on_one_version
from tests.waiting import wait_until

#: More than a worker takes at once.
EARLY_TASKS = 400

SEND_EARLY = f"""
import json
from datetime import UTC, datetime, timedelta
now = datetime.now(UTC)
print(json.dumps([
    app.tasks["note"].apply_async(("early",), eta=now + timedelta(seconds=seconds)).id
    for seconds in [5, 600, 600, 600] * ({EARLY_TASKS} // 4)
]))
"""


@on_one_version
@pytest.mark.parametrize("pool", ["prefork", *map(in_ci, ("threads", "solo", "gevent"))])
def test_a_pool_runs_delayed_tasks_and_holds_none(
    fleet: Fleet,
    rabbitmq: PrivateRabbitMQ,
    vhost: str,
    pool: Literal["prefork", "threads", "solo", "gevent"],
) -> None:
    """Tasks that come early from a plain producer are put back; each due task runs once."""
    # Celery's loop for gevent takes ten messages a second while broker heartbeats are on
    # (celery.worker.loops.synloop, _quick_drain).
    worker = fleet.worker(pool=pool, concurrency=3, broker_heartbeat=0)
    app = fleet.app()
    inspect = app.control.inspect(destination=[worker.name], timeout=10)
    prefetch = inspect.stats()[worker.name]["prefetch_count"]

    ids = json.loads(fleet.produce(SEND_EARLY))
    early, far = ids[::4], {*ids} - {*ids[::4]}
    before = time()
    delayed = app.tasks["note"].apply_async(("x",), countdown=1)
    after = time()
    retried = {
        name: app.tasks[name].apply_async(args, countdown=0.3, queue="side")
        for name, args in {"again": (5, 0.3), "busy": (3,)}.items()
    }

    def all_far_wait_in_the_broker() -> bool:
        queues = {queue["name"]: queue.get("messages", 0) for queue in rabbitmq.queues(vhost)}
        waiting = sum(count for name, count in queues.items() if "level-" in name)
        return waiting >= len(far) and queues["default"] == 0

    wait_until(all_far_wait_in_the_broker)
    assert fleet.held_by(worker) == []
    assert inspect.stats()[worker.name]["prefetch_count"] == prefetch
    (run,) = fleet.record.wait_for(task_id=delayed.id)
    run.assert_on_time(before + 1, after + 1)
    for name, times in (("again", 5), ("busy", 3)):
        runs = fleet.record.wait_for(times + 1, task_id=retried[name].id)
        assert [run.retries for run in runs] == list(range(times + 1))
        for run in runs:
            assert run.delivery_info == runs[0].delivery_info
            if run.due is not None:
                run.assert_on_time()

    found = fleet.record.wait_for_ids(early)
    for task_id in early:
        (run,) = found[task_id]
        run.assert_on_time()

    assert not {run.id for run in fleet.record.runs()} & far
    worker.stop()  # a clean stop: no task is delivered again
    attempts = [(run.id, run.retries) for run in fleet.record.runs()]
    assert len(attempts) == len(set(attempts))
    assert worker.log_lines("ERROR") == []
    assert worker.log_lines("Traceback") == []
