"""Everything Celery can delay over Redis, on prefork workers; the twin of test_tasks.

All tasks are sent before the first test looks, so that their waits overlap.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_native_delay.testing import private_redis, require_redis
from pytest_celery_native_delay import installed
from tests.acceptance.everything import (
    DELAYS,
    ROUTES,
    Everything,
    due,
    same_delivery,
    started_workers,
)
from tests.acceptance.worker import Fleet, Worker, fleet_on
from tests.waiting import wait_until

#: kombu's Redis transport takes an exchange that this process has not declared for a direct one:
#: by the mere name of a topic exchange nothing arrives, delayed or not.
BY_NAME = [route for route in ROUTES if not route.startswith("topic")]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    installed(require_redis, "redis")
    folder = tmp_path_factory.mktemp("redis-tasks")
    (folder / "results").mkdir()
    with private_redis(server="redis") as server:
        conf = {"result_backend": f"file://{folder}/results"}
        with fleet_on(server.socket_url, folder, **conf) as fleet:
            yield fleet


@pytest.fixture(scope="module")
def workers(fleet: Fleet) -> list[Worker]:
    return started_workers(fleet)


@pytest.fixture(scope="module")
def everything(fleet: Fleet, workers: list[Worker]) -> Everything:
    return Everything(fleet, fleet.app())


@pytest.mark.ci
def test_the_worker_holds_nothing_while_tasks_wait(
    everything: Everything, workers: list[Worker]
) -> None:
    everything.assert_none_held_by(workers)


@pytest.mark.parametrize("name", DELAYS)
def test_a_delay(everything: Everything, name: str) -> None:
    sent, delay = everything.delays[name], DELAYS[name]
    run = everything.run_once(sent)
    by_eta = delay.seconds and "eta" in sent.options
    earliest = due(sent) if by_eta else sent.before + delay.seconds
    run.assert_on_time(earliest, sent.after + delay.seconds)
    assert same_delivery(run, everything.run_once(everything.undelayed["no route"]))
    assert run.eta is not None


def test_the_task_sees_the_original_eta_and_its_own_headers(everything: Everything) -> None:
    for name in ("aware eta", "aware eta elsewhere", "naive eta", "eta in the past"):
        sent = everything.delays[name]
        assert everything.run_once(sent).eta == sent.options["eta"].isoformat()
    run = everything.run_once(everything.delays["headers of one's own"])
    assert run.headers == {"customer": 7}
    assert everything.run_once(everything.delays["countdown=1"]).headers is None


@pytest.mark.parametrize("route", BY_NAME)
def test_a_route(everything: Everything, route: str) -> None:
    everything.assert_arrived_as_undelayed(route)


@pytest.mark.parametrize("route", BY_NAME)
def test_a_retry_comes_back_to_its_queue(everything: Everything, route: str) -> None:
    everything.assert_retried(route)


def test_canvas(everything: Everything) -> None:
    sent = everything.chain
    first, second, third = (everything.noted(f"link {number}") for number in (1, 2, 3))
    first.assert_on_time(sent.before + 1, sent.after + 1)
    second.assert_on_time(first.started + 1)
    third.assert_on_time(second.started + 1)
    sent = everything.group
    for number in (1, 2, 3):
        run = everything.noted(f"member {number}")
        run.assert_on_time(sent.before + 1, sent.after + 1)
    (body,) = everything.fleet.record.wait_for(name="gather")
    assert sorted(body.args[0]) == ["part 1", "part 2", "part 3"]


def test_a_task_that_expires_before_it_is_due_is_revoked(everything: Everything) -> None:
    result = everything.expired.result
    wait_until(lambda: result.state == "REVOKED")
    assert everything.fleet.record.runs(task_id=result.id) == []


def test_what_does_not_arrive_undelayed_does_not_arrive_delayed(everything: Everything) -> None:
    sent = {**everything.undelayed, **{f"{k}, delayed": v for k, v in everything.routes.items()}}
    record = everything.fleet.record
    arrived = {name for name, each in sent.items() if record.runs(task_id=each.id)}
    assert arrived == {*BY_NAME, *(f"{route}, delayed" for route in BY_NAME)}


def test_nothing_ran_twice(everything: Everything) -> None:
    attempts = [(run.id, run.retries) for run in everything.fleet.record.runs()]
    assert len(attempts) == len(set(attempts))
