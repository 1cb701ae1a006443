"""Cancelling and moving tasks that wait in RabbitMQ, with the ledger in its streams."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from time import time, time_ns

import amqp
import pytest
from celery import Celery

from celery_native_delay import Delay
from celery_native_delay.message import Delayed, Replaces
from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis
from celery_native_delay.transports.rabbitmq.streams.decisions import PENDING_MS
from celery_native_delay.transports.rabbitmq.streams.ledger import MARGIN_SECONDS
from tests.acceptance.cancelling import *  # noqa: F403
from tests.acceptance.worker import Fleet, fleet_on

pytestmark = [*pytestmark, pytest.mark.ci]  # noqa: F405  at home with a ledger in Redis


@pytest.fixture
def margin_seconds() -> float:
    return MARGIN_SECONDS


@pytest.fixture
def fleet(vhost_url: str, ledger_redis: PrivateRedis, tmp_path: Path) -> Iterator[Fleet]:
    conf = {"native_delay_ledger": "stream"} | results_in(ledger_redis)  # noqa: F405
    with fleet_on(vhost_url, tmp_path, **conf) as fleet:
        with fleet.app().connection_for_write() as connection:
            delays = connection.default_channel.delays
            delays.prepare()  # on a busy machine a short delay would be over by then
            delays.preparation.prepare_ledger()
        yield fleet
    gc.collect()  # results unsubscribe


def test_nobody_runs_what_was_cancelled_before_the_broker_was_killed(
    mortal_streams: PrivateRabbitMQ, mortal_url: str, tmp_path: Path
) -> None:
    """Nor a copy whose mover died before its decision: the original runs, once."""
    with fleet_on(mortal_url, tmp_path, native_delay_ledger="stream") as fleet:
        app = fleet.app()
        delay = Delay(app)
        note = app.tasks["note"]
        dropped, kept, late = (note.apply_async((n,), countdown=25) for n in range(3))
        worker = fleet.worker(pool="solo")
        copy_without_decision(app, delay, kept.id)
        assert delay.cancel(dropped.id)
        worker.wait_for_log("Discarding revoked task", dropped.id)
        worker.wait_for_log("was never decided on")
        mortal_streams.kill()
        mortal_streams.start()
        assert delay.cancel(late.id)
        fleet.record.wait_for(task_id=kept.id)
        worker.wait_for_log("is dropped: it was moved", dropped.id)
        worker.wait_for_log("is dropped: it was moved", late.id)
        assert [run.id for run in fleet.record.runs()] == [kept.id]


def copy_without_decision(app: Celery, delay: Delay, task_id: str) -> None:
    """What is left of a mover that died; a worker waits for its decision for another second."""
    (task,) = delay.show(task_id)
    made_ms = round(time() * 1000) - PENDING_MS + 1500
    with app.connection_for_write() as connection:
        body = b'[["a copy"], {}, {"callbacks": null, "errbacks": null, "chain": null}]'
        connection.default_channel.delays.put_back(
            amqp.Message(
                body,
                application_headers={"task": task.name, "id": task.id, "lang": "py"},
                content_type="application/json",
                content_encoding="utf-8",
                correlation_id=task.id,
            ),
            Delayed(
                token_hex(16),
                time_ns() // 1000,
                "",
                task.queue,
                replaces=Replaces(task.delivery_id, made_ms),
            ),
            recorded=False,
        )
