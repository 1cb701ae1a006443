"""Faults while tasks wait: killed brokers and workers, deleted vhosts and queues."""

from __future__ import annotations

import signal
from collections.abc import Callable
from math import inf
from time import time
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from celery_native_delay.testing import PrivateRabbitMQ, vhost_name
from tests.acceptance.worker import FEW_LEVELS, Fleet, Worker
from tests.brokers import on_one_version
from tests.waiting import wait_until

PARKED = "celery_delay.v1.parked"


pytestmark = on_one_version


def send(app: Celery, countdown: float, *args: Any, **options: Any) -> tuple[str, float]:
    """Send a task; returns its id and the earliest Unix time at which it may run."""
    due = time() + countdown
    return app.tasks["note"].apply_async(args or ("x",), countdown=countdown, **options).id, due


@pytest.mark.ci
def test_the_broker_is_killed_while_tasks_wait(
    mortal_rabbitmq: PrivateRabbitMQ, mortal_url: str, new_fleet: Callable[..., Fleet]
) -> None:
    """Every task runs, none early, and none twice unless it had started before the kill."""
    fleet = new_fleet(mortal_url, native_delay_levels=FEW_LEVELS)
    worker = fleet.worker(concurrency=3)
    app = fleet.app()
    sent = dict(send(app, 1 + number * 0.12) for number in range(100))  # 1 to 13 seconds
    # However long the broker takes to return, the next of these is due soon afterwards.
    later = dict(send(app, 13 + number * 2) for number in range(1, 60))
    fleet.record.wait_for(10)
    mortal_rabbitmq.kill()
    mortal_rabbitmq.start()
    back = time()

    through_the_outage = min(due for due in (sent | later).values() if due > back)
    sent |= {task_id: due for task_id, due in later.items() if due <= through_the_outage}
    runs = fleet.record.wait_for_ids(list(sent))
    for task_id, due in sent.items():
        first, *again = runs[task_id]
        first.assert_on_time(due, inf)
        assert not again or first.started <= back, "ran twice"

    # A task sent now is on time, and the worker still holds no task.
    task_id, due = send(app, 1)
    (run,) = fleet.record.wait_for(task_id=task_id)
    run.assert_on_time(due)
    assert worker.process.poll() is None


@pytest.mark.ci
@pytest.mark.usefixtures("rabbitmq_version")
@pytest.mark.parametrize("broker", ["rabbitmq", "redis"])
def test_a_worker_is_killed_while_tasks_wait(
    request: pytest.FixtureRequest, new_fleet: Callable[..., Fleet], broker: str
) -> None:
    """The tasks run as planned, because they wait in the broker."""
    if broker == "redis":
        fleet = new_fleet(request.getfixturevalue("store_redis").url)
    else:
        fleet = request.getfixturevalue("fleet")
    first = fleet.worker(name="first")
    app = fleet.app()
    send(app, 600)  # declares
    sent = dict(send(app, 5 + number * 0.05) for number in range(40))
    second = fleet.worker(name="second", wait=False)
    first.kill()
    second.wait_ready()
    runs = fleet.record.wait_for_ids(list(sent))
    for task_id, due in sent.items():
        (run,) = runs[task_id]
        run.assert_on_time(due)
        assert run.worker == second.name


def test_a_deleted_and_recreated_vhost_works_again(fleet: Fleet, rabbitmq: PrivateRabbitMQ) -> None:
    """The waiting tasks are lost with the vhost; tasks sent afterwards run."""
    worker = fleet.worker()
    app = fleet.app()
    task_id, _ = send(app, 0.3)
    fleet.record.wait_for(task_id=task_id)

    recreate_vhost(rabbitmq, fleet.broker_url, worker)
    # The producer finds the levels gone before the worker, which waits before it reconnects.
    broadcast = {"exchange": "broadcast", "routing_key": ""}
    sent = dict(send(app, 1, **options) for options in ({}, {"queue": "side"}))
    wait_until(lambda: is_declared(fleet.broker_url, "broadcast"))
    sent |= [send(app, 1, **broadcast)]
    runs = fleet.record.wait_for_ids(list(sent))
    for task_id, due in sent.items():
        (run,) = runs[task_id]
        run.assert_on_time(due, inf)
    worker.wait_for_log("native delay:", "declared in", count=2)


def recreate_vhost(rabbitmq: PrivateRabbitMQ, url: str, worker: Worker) -> None:
    """Recreate the vhost while the worker is paused: Celery stops if it has no permissions yet."""
    name = vhost_name(url)
    worker.process.send_signal(signal.SIGSTOP)
    rabbitmq.delete_vhost(name)
    rabbitmq.api("PUT", f"/vhosts/{name}")
    everything = dict.fromkeys(("configure", "write", "read"), ".*")
    rabbitmq.api("PUT", f"/permissions/{name}/guest", everything)
    worker.process.send_signal(signal.SIGCONT)


def is_declared(url: str, exchange: str) -> bool:
    """False if there is no such exchange: without it even an immediate task fails."""
    with Connection(url) as connection:
        try:
            connection.default_channel.exchange_declare(exchange, "fanout", passive=True)
        except connection.channel_errors:
            return False
    return True


LEVEL = f"celery_delay.v1.{FEW_LEVELS}x125ms.f0.quorum.level-{{}}"


@pytest.mark.ci
def test_a_level_queue_deleted_while_the_task_waits(fleet: Fleet) -> None:
    """The task is parked at the missing level. A worker puts it back for the remaining time."""
    app = fleet.app()
    send(app, 600)  # declares
    task_id, due = send(app, 15.8)  # 8 s in level 6, then 7.8 s in lower ones
    with Connection(fleet.broker_url) as connection:
        connection.default_channel.queue_delete(LEVEL.format("05"))
    wait_until(lambda: fleet.depth(PARKED) == 1)
    worker = fleet.worker()
    (run,) = fleet.record.wait_for(task_id=task_id)
    run.assert_on_time(due)
    # A machine too busy to boot a worker within 8 s finds it due already.
    assert worker.log_lines("1 waiting again") or worker.log_lines("1 parked message(s) delivered")
