"""Cancelling and moving tasks that wait in RabbitMQ, with records beside it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from time import sleep, time

import pytest

from celery_native_delay import Delay
from celery_native_delay.testing import PrivateRedis, private_redis
from tests.acceptance.cancelling import *  # noqa: F403
from tests.acceptance.worker import Fleet, fleet_on
from tests.brokers import on_one_version


@pytest.fixture
def margin_seconds() -> float:
    return 0.0


@pytest.fixture
def fleet(vhost_url: str, records_redis: PrivateRedis, tmp_path: Path) -> Iterator[Fleet]:
    conf = {"native_delay_records": records_redis.url} | results_in(records_redis)  # noqa: F405
    with fleet_on(vhost_url, tmp_path, **conf) as fleet:
        yield fleet
    gc.collect()  # results unsubscribe


@pytest.mark.ci
@on_one_version
def test_a_thousand_of_ten_thousand_are_cancelled_and_exactly_those_do_not_run(
    fleet: Fleet,
) -> None:
    cancel_a_thousand_of_ten_thousand(fleet)  # noqa: F405


@pytest.mark.ci
def test_due_tasks_wait_for_records_that_are_away(vhost_url: str, tmp_path: Path) -> None:
    """Nothing that was cancelled runs; what was not, runs when the records are back."""
    with private_redis() as records:
        conf = {"native_delay_records": records.url, "native_delay_records_away": "wait"}
        with fleet_on(vhost_url, tmp_path, **conf) as fleet:
            app = fleet.app()
            worker = fleet.worker(pool="solo")
            kept, dropped = (app.tasks["note"].apply_async((n,), countdown=3) for n in (1, 2))
            due = time() + 3
            assert Delay(app).cancel(dropped.id)
            worker.wait_for_log("Discarding revoked task", dropped.id)
            records.kill()
            worker.wait_for_log("the records at", "are away")
            sleep(max(due + 1 - time(), 0))
            assert fleet.record.runs() == []
            records.start()
            fleet.record.wait_for(task_id=kept.id)
            worker.wait_for_log("is dropped: it was cancelled or rescheduled", dropped.id)
            assert {run.id for run in fleet.record.runs()} == {kept.id}
