"""Metrics: what a real exporter serves about real brokers and a real worker with events on."""

from __future__ import annotations

from pathlib import Path
from time import time

import pytest
from kombu import Queue

from celery_native_delay import Delay
from celery_native_delay.testing import PrivateRedis, private_redis
from tests.acceptance.exporter import exporter_of
from tests.acceptance.worker import Fleet, fleet_on


def come_to_every_end(fleet: Fleet) -> None:
    """Tasks for the queue "side": one that runs, one that is cancelled, one that expires."""
    app = fleet.app()
    note = app.tasks["note"]
    note.apply_async(("runs",), countdown=1, queue="side")
    note.apply_async(("expires",), countdown=1, expires=0.5, queue="side")
    assert Delay(app).cancel(note.apply_async(("never",), countdown=3600, queue="side").id)


@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
def test_what_waits_in_redis_is_told_and_what_came_of_it(
    own_redis: PrivateRedis, tmp_path: Path
) -> None:
    with fleet_on(own_redis.url, tmp_path) as fleet, exporter_of(fleet) as exporter:
        app = fleet.app()
        note = app.tasks["note"]
        exporter.wait_for("store_up", 1)
        exporter.wait_for("overdue_seconds", 0)
        assert exporter.value("next_due_timestamp_seconds") is None
        assert exporter.value("matured_total", queue_name="side") == 0

        due = time() + 600
        for number in range(3):
            note.apply_async((number,), countdown=600 + number)
        exporter.wait_for("pending", 3)
        next_due = exporter.value("next_due_timestamp_seconds")
        assert next_due is not None
        assert abs(next_due - due) < 5

        app.amqp.queues.add(Queue("no-list", routing_key="no-list"))
        note.apply_async(("parks",), countdown=1, queue="no-list")
        own_redis.client.set("no-list", "a string")
        exporter.wait_for("overdue_seconds", lambda value: value is not None and value > 0.5)

        worker = fleet.worker(pool="threads", more=("-E",))
        exporter.wait_for("unroutable_messages", 1)
        exporter.wait_for("overdue_seconds", 0)
        come_to_every_end(fleet)
        for name in ("matured_total", "cancelled_total", "expired_total"):
            exporter.wait_for(name, 1, queue_name="side")
        exporter.wait_for("lateness_seconds_count", 1, queue_name="side")
        worker.stop()

        own_redis.kill()
        exporter.wait_for("store_up", 0)
        assert exporter.value("pending") is None
        assert exporter.value("matured_total", queue_name="side") == 1
        own_redis.start()
        exporter.wait_for("store_up", 1)


@pytest.mark.parametrize("rabbitmq_version", ["3.10"], indirect=True)
def test_what_waits_in_rabbitmq_is_told_and_what_came_of_it(vhost_url: str, tmp_path: Path) -> None:
    with (
        private_redis() as ledger,
        fleet_on(vhost_url, tmp_path, native_delay_ledger=ledger.url) as fleet,
        exporter_of(fleet) as exporter,
    ):
        exporter.wait_for("store_up", 1)
        note = fleet.app().tasks["note"]
        due = time() + 600
        for number in range(3):
            note.apply_async((number,), countdown=600 + number)
        exporter.wait_for("pending", 3)
        exporter.wait_for("messages", 3, level="level-12", ttl_seconds="512")
        exporter.wait_for("messages", 0, level="level-00", ttl_seconds="0.125")
        next_due = exporter.value("next_due_timestamp_seconds")
        assert next_due is not None
        assert abs(next_due - due) < 5

        worker = fleet.worker(more=("-E",))
        come_to_every_end(fleet)
        for name in ("matured_total", "cancelled_total", "expired_total"):
            exporter.wait_for(name, 1, queue_name="side")
        exporter.wait_for("lateness_seconds_count", 1, queue_name="side")
        sum_seconds = exporter.value("lateness_seconds_sum", queue_name="side")
        assert sum_seconds is not None
        assert 0 < sum_seconds < 30
        worker.stop()

        ledger.kill()
        exporter.wait_for("ledger_up", 0)
        assert exporter.value("overdue_seconds") is None
        assert exporter.value("pending") == 4  # what is cancelled stays in its level
