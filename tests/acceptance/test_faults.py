"""Faults while tasks wait: killed brokers and workers, deleted vhosts and queues."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from celery_native_delay.testing import PrivateRabbitMQ, vhost_name
from tests.acceptance.worker import FEW_LEVELS, Fleet, Worker, fleet_on
from tests.brokers import on_one_version
from tests.waiting import wait_until

PARKED = "celery_delay.v1.parked"


@pytest.fixture
def own_fleet(mortal_url: str, tmp_path: Path) -> Iterator[Fleet]:
    """Workers and producers on a broker that this test may kill."""
    with fleet_on(
        mortal_url, tmp_path, native_delay_levels=FEW_LEVELS, native_delay_fused_bits=0
    ) as fleet:
        yield fleet


def send(app: Celery, countdown: float, *args: Any, **options: Any) -> tuple[str, float]:
    """Send a task; returns its id and the earliest Unix time at which it may run."""
    due = time() + countdown
    return app.tasks["note"].apply_async(args or ("x",), countdown=countdown, **options).id, due


@on_one_version
@pytest.mark.ci
def test_the_broker_is_killed_while_tasks_wait(
    mortal_rabbitmq: PrivateRabbitMQ, own_fleet: Fleet
) -> None:
    """Every task runs, none early, and none twice unless it had started before the kill."""
    fleet = own_fleet
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
        assert first.early(due) <= 0.001
        assert not again or first.started <= back, "ran twice"

    # A task sent now is on time, and the worker still holds no task.
    task_id, due = send(app, 1)
    (run,) = fleet.record.wait_for(task_id=task_id)
    run.assert_on_time(due)
    assert worker.process.poll() is None


@on_one_version
@pytest.mark.ci
def test_a_worker_is_killed_while_tasks_wait(fleet: Fleet) -> None:
    """The tasks run as planned, because they wait in the broker."""
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


@on_one_version
def test_the_vhost_is_deleted_and_recreated_under_producer_and_worker(
    fleet: Fleet, rabbitmq: PrivateRabbitMQ
) -> None:
    """The waiting tasks are lost with the vhost; tasks sent afterwards run."""
    worker = fleet.worker()
    app = fleet.app()
    task_id, _ = send(app, 0.3)
    fleet.record.wait_for(task_id=task_id)

    recreate_vhost(rabbitmq, fleet.broker_url, worker)
    # The producer finds the levels gone before the worker, which waits before it reconnects.
    sent = dict(
        send(app, 1, **options)
        for options in (
            {},
            {"queue": "side"},
            {"exchange": "broadcast", "routing_key": ""},
        )
        if wait_for_exchange(fleet.broker_url, options.get("exchange"))
    )
    runs = fleet.record.wait_for_ids(list(sent))
    for task_id, due in sent.items():
        (run,) = runs[task_id]
        assert run.early(due) <= 0.001
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


def wait_for_exchange(url: str, exchange: str | None) -> bool:
    """Wait until *exchange* is declared: without it even an immediate task fails."""

    def exists() -> bool:
        with Connection(url) as connection:
            try:
                connection.default_channel.exchange_declare(exchange, "fanout", passive=True)
            except connection.channel_errors:
                return False
            return True

    return exchange is None or wait_until(exists)


@on_one_version
def test_tasks_sent_before_the_first_worker_starts(fleet: Fleet) -> None:
    """The producer declares the levels and the task queue, so the tasks wait for the worker."""
    app = fleet.app()
    routes: list[dict[str, Any]] = [{}, {"queue": "side"}, {"queue": "orders"}, {"queue": "news"}]
    sent = dict(send(app, countdown, **route) for route in routes for countdown in (0.3, 6))
    fleet.worker()
    runs = fleet.record.wait_for_ids(list(sent))
    for task_id, due in sent.items():
        (run,) = runs[task_id]
        assert run.early(due) <= 0.001
        run.assert_on_time(due)


@on_one_version
def test_tasks_to_a_deleted_queue_park_and_come_back(fleet: Fleet) -> None:
    """Parked tasks delay no other task, and run as soon as a worker for their queue starts."""
    fleet.worker(name="steady", queues="default")
    app = fleet.app()
    send(app, 600, queue="side")  # declares
    delete_queue(fleet, "side")
    lost = dict(send(app, 2 + number * 0.01, "lost", queue="side") for number in range(100))
    correct = dict(send(app, 2 + number * 0.1) for number in range(20))

    # They come while the lost ones stay where they are.
    runs = fleet.record.wait_for_ids(list(correct))
    for task_id, due in correct.items():
        (run,) = runs[task_id]
        run.assert_on_time(due)

    wait_until(lambda: fleet.depth(PARKED) == 100)
    fleet.worker(name="returned", queues="side")
    runs = fleet.record.wait_for_ids(list(lost))
    (undelayed,) = fleet.record.wait_for(task_id=send(app, 0, "now", queue="side")[0])
    for task_id, due in lost.items():
        (run,) = runs[task_id]
        assert run.early(due) <= 0.001
        assert run.worker.startswith("returned")
        assert run.delivery_info == undelayed.delivery_info
    assert fleet.depth(PARKED) == 0


LEVEL = f"celery_delay.v1.{FEW_LEVELS}x125ms.f0.quorum.level-{{}}"


@on_one_version
def test_a_level_queue_deleted_before_the_task_is_sent(fleet: Fleet) -> None:
    """The producer notices the missing queue, declares it and publishes again."""
    fleet.worker()
    app = fleet.app()
    probe, _ = send(app, 0.3)
    fleet.record.wait_for(task_id=probe)
    delete_queue(fleet, LEVEL.format("03"))
    task_id, due = send(app, 1)  # 1000 in units of 125 ms
    (run,) = fleet.record.wait_for(task_id=task_id)
    run.assert_on_time(due)


@on_one_version
@pytest.mark.ci
def test_a_level_queue_deleted_while_the_task_waits(fleet: Fleet) -> None:
    """The task is parked at the missing level. A worker puts it back for the remaining time."""
    app = fleet.app()
    send(app, 600)  # declares
    task_id, due = send(app, 15.8)  # 8 s in level 6, then 7.8 s in lower ones
    delete_queue(fleet, LEVEL.format("05"))

    def parked() -> bool:
        return fleet.depth(PARKED) == 1

    wait_until(parked)
    worker = fleet.worker()
    (run,) = fleet.record.wait_for(task_id=task_id)
    run.assert_on_time(due)
    # A machine too busy to boot a worker within 8 s finds it due already.
    assert worker.log_lines("1 waiting again") or worker.log_lines("1 parked message(s) delivered")


def delete_queue(fleet: Fleet, queue: str) -> None:
    with Connection(fleet.broker_url) as connection:
        connection.default_channel.queue_delete(queue)


@on_one_version
@pytest.mark.ci
def test_the_broker_is_down(mortal_rabbitmq: PrivateRabbitMQ, own_fleet: Fleet) -> None:
    """While the broker is down, sending a delayed task fails as sending an immediate one does."""
    app = own_fleet.app(broker_connection_timeout=1)
    note = app.tasks["note"]
    send(app, 60)
    mortal_rabbitmq.kill()
    errors = []
    for options in ({}, {"countdown": 1}):
        attempt = partial(note.apply_async, ("x",), retry=False, **options)
        with pytest.raises(note.OperationalError) as caught:
            attempt()
        errors.append(type(caught.value))
    assert errors[0] is errors[1]
