"""Tasks that are ``once``, under killed workers, double messages and batches that are sent again.

Each success counts once. A run that was cut short is repeated.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from celery_native_delay.bulk import bulk
from tests.acceptance.worker import Fleet
from tests.brokers import ON_SYSTEM, in_ci
from tests.waiting import wait_until

ONCE = ["note", "careful", "hold", "alone", "killed_after", "mortal"]

#: Of the claim in these workers; in others it is a minute.
LEASE_SECONDS = 3.0

DROPPED = "it has run already, and it is once"


@pytest.fixture(params=["redis", in_ci(f"{ON_SYSTEM.id}-sqlite")])
def fleet(request: pytest.FixtureRequest, fleet_at: Callable[..., Fleet]) -> Fleet:
    """On RabbitMQ, the tasks wait in the broker, and the claims are in SQLite."""
    conf: dict[str, Any] = {"native_delay_once": ONCE, "tests_lease_seconds": LEASE_SECONDS}
    if request.param == "redis":
        # The next worker delivers a killed worker's messages again when it starts.
        conf["broker_transport_options"] = {"visibility_timeout": 0.1}
    else:
        conf["native_delay_store_tasks"] = ["nothing"]
    return fleet_at(request.param, **conf)


def phases(fleet: Fleet) -> list[str]:
    file = Path(f"{fleet.record.path}.phases")
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["phase"] for line in lines]


@pytest.mark.ci
def test_a_worker_killed_between_success_and_ack_causes_no_second_run(fleet: Fleet) -> None:
    worker = fleet.worker(concurrency=1)
    task_id = fleet.app().send_task("killed_after", countdown=0.5).id
    worker.process.wait(60)
    assert phases(fleet) == ["ends"]
    fleet.worker(concurrency=1).wait_for_log(task_id, DROPPED)
    assert phases(fleet) == ["ends"]


@pytest.mark.ci
def test_a_worker_killed_within_a_run_leaves_a_claim_that_ends_with_its_lease(fleet: Fleet) -> None:
    """Then the task runs to its end, once."""
    worker = fleet.worker(concurrency=1)
    task_id = fleet.app().send_task("alone", ("a", LEASE_SECONDS + 1), countdown=0.5).id
    wait_until(lambda: "begins" in phases(fleet))
    worker.kill()
    another = fleet.worker(concurrency=1)
    wait_until(lambda: "ends" in phases(fleet))
    fleet.app().send_task("alone", ("a", 0), task_id=task_id)
    another.wait_for_log(task_id, DROPPED)
    assert phases(fleet) == ["begins", "begins", "ends"]


@pytest.mark.ci
def test_a_killed_pool_process_leaves_no_claim(fleet: Fleet) -> None:
    """The task is delivered again, and does not wait for the end of the lease."""
    fleet.worker(tests_lease_seconds=600)
    killed = fleet.app().send_task("mortal", countdown=0.5).id
    fleet.record.wait_for(2, task_id=killed)


def test_of_two_messages_with_an_id_one_runs_unless_it_fails(fleet: Fleet) -> None:
    """Both at the same time, then one after a success, delayed or not."""
    app = fleet.app()
    worker = fleet.worker(concurrency=4)
    for task_id, seconds in ("good", 1), ("bad", "no number"):
        for _ in range(2):
            app.send_task("hold", (seconds,), task_id=task_id)
    worker.wait_for_log("good", DROPPED)
    fleet.record.wait_for(2, task_id="bad")
    app.send_task("hold", (1,), task_id="good", countdown=0.5)
    worker.wait_for_log("good", DROPPED, count=2)
    # Another task with the same id is another task.
    app.send_task("note", task_id="good")
    fleet.record.wait_for(1, task_id="good", name="note")
    counts = Counter((run.id, run.name) for run in fleet.record.runs())
    assert counts == {("good", "hold"): 1, ("bad", "hold"): 2, ("good", "note"): 1}


def test_a_batch_that_is_sent_again_whole_runs_once(fleet: Fleet) -> None:
    """Before it was due, and after it has run; its messages wait in the broker."""
    app, tasks = fleet.app(), 40

    def send() -> list[str]:
        with bulk(app) as batch:
            return [
                batch.send("note", (number,), task_id=f"order-{number}", countdown=1)
                for number in range(tasks)
            ]

    ids = send()
    send()
    worker = fleet.worker()
    fleet.record.wait_for_ids(ids)
    send()
    worker.wait_for_log(DROPPED, count=2 * tasks)
    assert Counter(run.id for run in fleet.record.runs()) == Counter(ids)
