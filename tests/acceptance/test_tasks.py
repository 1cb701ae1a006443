"""Everything Celery can delay, on one prefork worker: once, never early, in time, as undelayed.

All tasks are sent before the first test looks, so that their waits overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
from celery.result import AsyncResult, GroupResult

from celery_native_delay.testing import PrivateRabbitMQ, vhost_name
from tests.acceptance.everything import (
    DELAYS,
    RETRIES,
    ROUTES,
    Everything,
    assert_same_way,
    due,
    same_delivery,
    started_workers,
)
from tests.acceptance.worker import Fleet, Run, Worker, fleet_on
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def fleet(rabbitmq: PrivateRabbitMQ, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "results").mkdir()
    url = rabbitmq.new_vhost()
    with fleet_on(url, folder, result_backend=f"file://{folder}/results") as fleet:
        yield fleet
    rabbitmq.delete_vhost(vhost_name(url))


@pytest.fixture(scope="module")
def workers(fleet: Fleet) -> list[Worker]:
    return started_workers(fleet)


@pytest.fixture(scope="module")
def everything(fleet: Fleet, workers: list[Worker]) -> Everything:
    return Everything(fleet, fleet.app())


def test_the_worker_holds_nothing_while_tasks_wait(
    everything: Everything, workers: list[Worker]
) -> None:
    everything.assert_none_held_by(workers)


@pytest.mark.parametrize("name", DELAYS)
def test_a_delay(everything: Everything, name: str) -> None:
    sent, delay = everything.delays[name], DELAYS[name]
    run = everything.run_once(sent)
    earliest = due(sent) if delay.seconds and "eta" in sent.options else sent.before + delay.seconds
    run.assert_on_time(earliest, sent.after + delay.seconds)
    undelayed = everything.run_once(everything.undelayed["no route"])
    assert same_delivery(run, undelayed)
    assert run.eta is not None


def test_the_task_sees_the_original_eta(everything: Everything) -> None:
    for name in ("aware eta", "aware eta elsewhere", "naive eta", "eta in the past"):
        sent = everything.delays[name]
        run = everything.run_once(sent)
        assert run.eta == sent.options["eta"].isoformat()


def test_options_survive_the_delay(everything: Everything) -> None:
    undelayed = everything.run_once(everything.priority)
    assert everything.run_once(everything.delays["priority"]).delivery_info["priority"] == 7
    assert undelayed.delivery_info["priority"] == 7

    sent = everything.delays["expires after the delay"]
    run = everything.run_once(sent)
    assert run.expires is not None
    expires = datetime.fromisoformat(run.expires).timestamp()
    assert sent.before <= expires - 60 <= sent.after

    run = everything.run_once(everything.delays["headers of one's own"])
    assert run.headers == {"customer": 7}
    assert everything.run_once(everything.delays["countdown=1"]).headers is None


def test_a_task_that_expires_before_it_is_due_is_revoked(everything: Everything) -> None:
    result: AsyncResult = everything.expired.result

    def revoked() -> bool:
        return bool(result.state == "REVOKED")

    wait_until(revoked)
    assert everything.fleet.record.runs(task_id=result.id) == []


@pytest.mark.parametrize("route", ROUTES)
def test_a_route(everything: Everything, route: str) -> None:
    everything.assert_arrived_as_undelayed(route)


@pytest.mark.parametrize("route", ROUTES)
def test_a_retry_comes_back_to_its_queue(everything: Everything, route: str) -> None:
    everything.assert_retried(route)


@pytest.mark.parametrize("route", ROUTES)
def test_an_autoretry_with_jitter_comes_back_to_its_queue(
    everything: Everything, route: str
) -> None:
    sent = everything.autoretries[route]
    runs = everything.fleet.record.wait_for(RETRIES + 1, task_id=sent.id)
    assert [run.retries for run in runs] == list(range(RETRIES + 1))
    assert_same_way(runs, everything.run_once(everything.undelayed[route]))
    for run in runs:
        if run.due is not None:  # jitter may choose no delay at all
            run.assert_on_time(run.due)


@pytest.mark.parametrize("route", ROUTES)
def test_a_task_resent_with_its_own_headers(everything: Everything, route: str) -> None:
    def runs() -> list[Run]:
        found = everything.fleet.record.runs(name="resend")
        return [run for run in found if (run.headers or {}).get("customer") == route]

    def all_six() -> bool:
        return len(runs()) >= 6

    wait_until(all_six)
    assert [run.args[0] for run in runs()] == [5, 4, 3, 2, 1, 0]
    assert_same_way(runs(), everything.run_once(everything.undelayed[route]))
    for before, run in pairwise(runs()):
        assert run.headers == {"customer": route}
        assert run.due is not None
        assert run.due >= before.started + 0.3
        run.assert_on_time(run.due)


def test_a_link_follows(everything: Everything) -> None:
    sent = everything.link
    run = everything.run_once(sent)
    run.assert_on_time(sent.before + 1, sent.after + 1)
    everything.noted("linked").assert_on_time(run.started + 1)


def test_each_link_of_a_chain_waits_for_the_one_before(everything: Everything) -> None:
    sent = everything.chain
    first, second, third = (everything.noted(f"link {number}") for number in (1, 2, 3))
    first.assert_on_time(sent.before + 1, sent.after + 1)
    second.assert_on_time(first.started + 1)
    third.assert_on_time(second.started + 1)


def test_a_group_waits(everything: Everything) -> None:
    sent = everything.group
    for number in (1, 2, 3):
        everything.noted(f"member {number}").assert_on_time(sent.before + 1, sent.after + 1)


def test_a_chord_waits(everything: Everything) -> None:
    sent = everything.chord
    parts = [everything.noted(f"part {number}") for number in (1, 2, 3)]
    for part in parts:
        part.assert_on_time(sent.before + 1, sent.after + 1)
    (body,) = everything.fleet.record.wait_for(name="gather")
    assert sorted(body.args[0]) == ["part 1", "part 2", "part 3"]
    last = max(part.started for part in parts)
    # celery.chord_unlock looks every half second, and retries through the levels itself.
    body.assert_on_time(last + 0.5, last + 0.5 + 0.5)


def test_a_skewed_group(everything: Everything) -> None:
    sent = everything.skewed
    assert isinstance(sent.result, GroupResult)
    for number, seconds in ((1, 1), (2, 1.5), (3, 2)):
        run = everything.noted(f"skew {number}")
        run.assert_on_time(sent.before + seconds, sent.after + seconds)


@pytest.mark.ci
def test_a_worker_with_a_shorter_limit_lets_a_task_wait_in_hops(
    rabbitmq: PrivateRabbitMQ, tmp_path: Path
) -> None:
    """It comes each time when the longest delay is over, and the worker holds nothing."""
    url = rabbitmq.new_vhost()
    with fleet_on(url, tmp_path, native_delay_levels=5) as fleet:  # 3.9 s
        worker = fleet.worker()
        task_id = fleet.produce("print(app.tasks['note'].apply_async((1,), countdown=11).id)")
        run = fleet.record.wait_for_ids([task_id.strip()])[task_id.strip()][0]
        assert run.due is not None
        run.assert_on_time(run.due)
        assert worker.log_lines("keeps a task in memory") == []
    rabbitmq.delete_vhost(vhost_name(url))


def test_nothing_ran_twice(everything: Everything) -> None:
    """The last test: by now every task of the module has had time to show itself once more."""
    attempts = [(run.id, run.retries) for run in everything.fleet.record.runs()]
    assert len(attempts) == len(set(attempts))
