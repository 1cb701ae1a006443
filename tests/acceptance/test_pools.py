"""All four pools run delayed tasks, retries and early tasks, and hold none in the worker."""

from __future__ import annotations

import json
from time import time
from typing import Literal

import pytest

from celery_native_delay.testing import PrivateRabbitMQ
from tests.acceptance.worker import Fleet
from tests.brokers import on_one_version
from tests.waiting import wait_until

EARLY_TASKS = 40

SEND_EARLY = f"""
import json
from datetime import UTC, datetime, timedelta
now = datetime.now(UTC)
print(json.dumps([
    app.tasks["note"].apply_async(("early",), eta=now + timedelta(seconds=seconds)).id
    for seconds in [5, 600] * {EARLY_TASKS}
]))
"""


@on_one_version
@pytest.mark.ci
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_pool_runs_delayed_tasks_and_holds_none(
    fleet: Fleet,
    rabbitmq: PrivateRabbitMQ,
    vhost: str,
    pool: Literal["prefork", "threads", "solo", "gevent"],
) -> None:
    # Celery's loop for gevent takes ten messages a second while broker heartbeats are on
    # (celery.worker.loops.synloop, _quick_drain).
    worker = fleet.worker(pool=pool, concurrency=3, broker_heartbeat=0)
    app = fleet.app()
    inspect = app.control.inspect(destination=[worker.name], timeout=10)

    ids = json.loads(fleet.produce(SEND_EARLY))
    early, far = ids[::2], ids[1::2]
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
    assert inspect.scheduled() == {worker.name: []}
    (run,) = fleet.record.wait_for(task_id=delayed.id)
    run.assert_on_time(before + 1, after + 1)
    for name, times in (("again", 5), ("busy", 3)):
        runs = fleet.record.wait_for(times + 1, task_id=retried[name].id)
        assert [run.retries for run in runs] == list(range(times + 1))
        for run in runs:
            assert run.delivery_info == runs[0].delivery_info
            if run.due is not None:
                run.assert_on_time(run.due)

    found = fleet.record.wait_for_ids(early)
    for task_id in early:
        (run,) = found[task_id]
        assert run.due is not None
        run.assert_on_time(run.due)

    assert not {run.id for run in fleet.record.runs()} & set(far)
    worker.stop()  # a clean stop: no task is delivered again
    attempts = [(run.id, run.retries) for run in fleet.record.runs()]
    assert len(attempts) == len(set(attempts))
    assert worker.log_lines("ERROR") == []
    assert worker.log_lines("Traceback") == []
