"""Workers with a delay store: workers are killed, and the store becomes unreachable."""

from __future__ import annotations

from collections.abc import Callable
from time import time

import pytest
from sqlalchemy import create_engine, select, text

from celery_native_delay import Delay, StoreUnavailable
from celery_native_delay.bulk import bulk
from celery_native_delay.store.sql_table import TAKEN, TASKS
from tests.acceptance.worker import Fleet, Record
from tests.conformance.brokers import settings_of
from tests.integration.test_store_dispatching import away, space_of
from tests.waiting import wait_until

SENT = 1_200
KILLS = 3


@pytest.fixture(params=["filesystem"])
def fleet(request: pytest.FixtureRequest, fleet_at: Callable[..., Fleet]) -> Fleet:
    return fleet_at(request.param)


def ran(record: Record) -> int:
    return len({run.id for run in record.runs()})


@pytest.mark.ci
@pytest.mark.parametrize("fleet", ["sqla"], indirect=True)
def test_all_tasks_run_although_dispatchers_are_killed_repeatedly(
    fleet: Fleet,
) -> None:
    """Only tasks that a killed dispatcher had taken, and not deleted yet, may run twice.

    The killed workers consume another queue, because kombu's filesystem and sqlalchemy
    transports lose the messages of a killed worker, delayed or not.
    """
    app = fleet.app()
    consumer = fleet.worker(installed=False, queues="default", log_level="WARNING", wait=False)
    start = time() + 10
    with bulk(app) as batch:
        ids = [
            batch.send("note", (number,), countdown=start + number / 300 - time())
            for number in range(SENT)
        ]
    assert Delay(app).count() == SENT
    taken = set[str]()
    for _ in range(KILLS):
        before = ran(fleet.record)
        worker = fleet.worker(queues="side")
        wait_until(lambda before=before: ran(fleet.record) > before + SENT / 20)  # type: ignore[misc]
        worker.kill()
        taken |= taken_in(fleet.broker_url)
    assert ran(fleet.record) < SENT, "the last one was killed in the middle of it"
    fleet.worker(queues="side", wait=False)
    by_id = fleet.record.wait_for_ids(ids)
    assert consumer.process.poll() is None
    assert Delay(app).count() == 0
    assert {task_id for task_id in ids if len(by_id[task_id]) > 1} <= taken
    wait_until(lambda: published_to_the_broker(fleet.broker_url) == len(fleet.record.runs()))


def taken_in(url: str) -> set[str]:
    """The ids of tasks that dispatchers have taken from the store, and not deleted."""
    engine = create_engine(settings_of(url).get("store") or url.removeprefix("sqla+"))
    with engine.connect() as connection:
        asked = select(TASKS.c.task_id).where(TASKS.c.state == TAKEN)
        found = set(connection.execute(asked).scalars())
    engine.dispose()
    return found


def published_to_the_broker(url: str) -> int:
    """The number of tasks ever published to the broker: kombu keeps the row of each message."""
    engine = create_engine(url.removeprefix("sqla+"))
    with engine.connect() as connection:
        statement = text(
            "SELECT count(*) FROM kombu_message "
            "WHERE json_extract(payload, '$.headers.task') = 'note'"
        )
        count = int(connection.execute(statement).scalar_one())
    engine.dispose()
    return count


@pytest.mark.ci
def test_a_worker_survives_a_store_outage(fleet: Fleet) -> None:
    """Publishing raises meanwhile."""
    app = fleet.app()
    worker = fleet.worker(queues="default")
    first = app.send_task("note", (1,), countdown=1).id
    with away(space_of(fleet.broker_url) / "delays.db"):
        with pytest.raises(StoreUnavailable):
            app.send_task("note", (2,), countdown=1)
        worker.wait_for_log("due tasks wait in", "next attempt in")
    fleet.record.wait_for(1, task_id=first)
    worker.wait_for_log("are published again")


def test_a_worker_that_starts_before_its_store_dispatches_later(
    fleet: Fleet,
) -> None:
    task_id = fleet.app().send_task("note", (1,), countdown=1).id
    with away(space_of(fleet.broker_url) / "delays.db"):
        worker = fleet.worker(queues="default")
        assert worker.log_lines("delays.db does not work", "it does not answer yet")
        assert not worker.log_lines("native delay is OFF")
    fleet.record.wait_for(1, task_id=task_id)
