"""Ways to configure app and broker: delayed tasks run on time, or one sentence says why not."""

from __future__ import annotations

from pathlib import Path
from time import time
from typing import Any

import pytest
from celery import Celery

from celery_native_delay import SettingsError
from celery_native_delay.testing import PrivateRabbitMQ
from tests.acceptance.worker import FEW_LEVELS, Fleet, fleet_on
from tests.brokers import on_one_version
from tests.rabbitmqs import private_rabbitmq
from tests.waiting import wait_until

OUR_NAMES = "celery_delay."

pytestmark = on_one_version


def send_and_wait(fleet: Fleet, app: Celery, **options: Any) -> None:
    """A delayed task runs once and on time."""
    before = time()
    result = app.send_task("note", ("x",), countdown=1, **options)
    after = time()
    (run,) = fleet.record.wait_for(task_id=result.id)
    run.assert_on_time(before + 1, after + 1)


def run_now(fleet: Fleet, app: Celery) -> None:
    """An immediate task runs."""
    fleet.record.wait_for(task_id=app.send_task("note", ("now",)).id)


@pytest.mark.ci
def test_separate_read_and_write_urls(fleet: Fleet, rabbitmq: PrivateRabbitMQ, vhost: str) -> None:
    """Separate read and write URLs with two users; the worker may also put early tasks back."""
    read = rabbitmq.add_user("reader", "r", vhost=vhost)
    write = rabbitmq.add_user("writer", "w", vhost=vhost)
    fleet.conf |= {"broker_read_url": read, "broker_write_url": write}
    fleet.broker_url = "amqp://nobody:nothing@127.0.0.1:1//"
    fleet.worker()
    app = fleet.app()
    send_and_wait(fleet, app)
    send_and_wait(fleet, app, queue="side")
    result = app.send_task("again", (2, 0.3), countdown=0.3)
    assert len(fleet.record.wait_for(3, task_id=result.id)) == 3
    early = fleet.produce("print(app.tasks['note'].apply_async(('x',), countdown=3).id)").strip()
    (run,) = fleet.record.wait_for(task_id=early)
    run.assert_on_time()


@pytest.mark.ci
def test_a_failover_to_another_broker(
    rabbitmq_version: str, vhost_url: str, tmp_path: Path
) -> None:
    """Producer and worker switch to the second URL of the list and prepare that broker."""
    with private_rabbitmq(version=rabbitmq_version, management=False) as first:
        urls = f"{first.url};{vhost_url}"
        with fleet_on(urls, tmp_path, native_delay_levels=FEW_LEVELS) as fleet:
            worker = fleet.worker(broker_connection_timeout=2)
            app = fleet.app(broker_connection_timeout=2)
            send_and_wait(fleet, app)
            first.kill()
            # The worker may need a while to come over; the task waits for it.
            send_and_wait(fleet, app)
            worker.wait_for_log("native delay:", "declared in")
            send_and_wait(fleet, app, queue="side")


def test_with_enabled_false_the_worker_holds_the_task(
    fleet: Fleet, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    """Switched off, the worker holds the task, and the package declares no queue or exchange."""
    worker = fleet.worker(native_delay_enabled=False)
    app = fleet.app(native_delay_enabled=False)
    app.send_task("note", ("far",), countdown=600)
    result = app.send_task("note", ("x",), countdown=2)
    wait_until(lambda: fleet.held_by(worker) != [])
    fleet.record.wait_for(task_id=result.id)
    assert [q for q in rabbitmq.queues(vhost) if q["name"].startswith(OUR_NAMES)] == []


def test_quorum_task_queues_on_a_topic_exchange(
    fleet: Fleet, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    """Quorum task queues switch Celery's own delayed delivery on, but not for an installed app."""
    fleet.conf["queue_type"] = "quorum"
    worker = fleet.worker()
    app = fleet.app()
    for route in ({}, {"exchange": "shop", "routing_key": "orders.new"}, {"queue": "side"}):
        send_and_wait(fleet, app, **route)
    result = app.send_task("again", (3, 0.3), countdown=0.3, queue="orders")
    assert len(fleet.record.wait_for(4, task_id=result.id)) == 4
    there = [*rabbitmq.queues(vhost), *rabbitmq.api("GET", f"/exchanges/{vhost}")]
    assert not [each for each in there if "celery_delayed" in each["name"]]
    assert worker.log_lines("CRITICAL") == []


def test_a_worker_names_policies_that_change_delays_and_diverts_full_queues(
    fleet: Fleet, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    rabbitmq.set_policy(vhost, "short-lived", "level", {"message-ttl": 500})
    full = {"max-length": 1, "overflow": "reject-publish"}
    rabbitmq.set_policy(vhost, "cap", "^orders$", full)
    credentials = rabbitmq.management_url.replace("://", "://guest:guest@")
    worker = fleet.worker(native_delay_management_url=credentials)
    worker.wait_for_log("WARNING", "short-lived", "message-ttl")
    worker.wait_for_log("WARNING", "'orders' may refuse messages", "landing")
    assert len(worker.log_lines("WARNING", "short-lived")) == 1
    assert "guest:guest" not in worker.log


@pytest.mark.parametrize(
    ("conf", "reason"),
    [
        ({"native_delay_declare": 0}, "expected native_delay_declare to be True or False"),
        ({"native_delay_delcare": 3}, "unknown setting native_delay_delcare; did you mean"),
    ],
)
def test_a_wrong_setting_in_the_configuration(
    fleet: Fleet, conf: dict[str, Any], reason: str
) -> None:
    """Nothing can be delayed: the worker logs this once, and runs immediate tasks."""
    worker, app = fleet.worker(**conf), fleet.app(**conf)
    run_now(fleet, app)
    with pytest.raises(SettingsError) as caught:
        app.send_task("note", ("x",), countdown=1)
    assert reason in str(caught.value)
    run_now(fleet, app)
    (line,) = worker.log_lines("CRITICAL")
    assert "native delay is OFF" in line
    assert reason in line


def test_a_beat_entry_with_a_countdown(fleet: Fleet) -> None:
    """Beat publishes through the app, so its delayed entries wait in the broker too."""
    entry = {"task": "note", "args": ["beat"], "schedule": 1.0, "options": {"countdown": 1.5}}
    worker = fleet.worker(
        more=("--beat", f"--schedule={fleet.folder}/beat"), beat_schedule={"every-second": entry}
    )
    for run in fleet.record.wait_for(3, name="note"):
        run.assert_on_time()
        assert fleet.held_by(worker) == []
