"""Every way to delay a task in Celery: it runs once, on time, and otherwise as without a delay.

All tasks are sent before the first test looks, so that their waits overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from time import time
from typing import Any

import pytest
from celery import Celery, chain, chord, group

from tests.acceptance.worker import Fleet, Run, Worker, fleet_on
from tests.brokers import ON_RABBITMQS, installed_rabbitmq
from tests.waiting import wait_until

RETRIES = 10

ROUTES: dict[str, dict[str, Any]] = {
    "no route": {},
    "queue": {"queue": "side"},
    "topic exchange": {"exchange": "shop", "routing_key": "orders.new.today"},
    "topic exchange, wildcard": {"exchange": "shop", "routing_key": "big.parcel"},
    "direct exchange": {"exchange": "billing", "routing_key": "invoice.new"},
    "fanout exchange": {"exchange": "broadcast", "routing_key": ""},
}

#: The routes whose only queue the second worker consumes.
TO_SECOND = ("queue", "topic exchange, wildcard")

IN_2_SECONDS = timedelta(seconds=2)

#: Options of a delayed task. An ETA is computed from the current time.
DELAYS: dict[str, dict[str, Any]] = {
    "countdown=0.3": {"countdown": 0.3},
    "countdown=1": {"countdown": 1},
    "countdown=1.5": {"countdown": 1.5},
    "countdown=5": {"countdown": 5},
    "negative countdown": {"countdown": -10},
    "aware eta": {"eta": lambda now: now + IN_2_SECONDS},
    "aware eta elsewhere": {"eta": lambda now: (now + IN_2_SECONDS).astimezone()},
    "naive eta": {"eta": lambda now: now.replace(tzinfo=None) + IN_2_SECONDS},
    "eta in the past": {"eta": lambda now: now - timedelta(hours=1)},
    "expires after the delay": {"countdown": 1, "expires": 60},
    "priority": {"countdown": 1, "priority": 7},
    "headers of one's own": {"countdown": 1, "headers": {"customer": 7}},
}


@dataclass(frozen=True)
class Sent:
    """A sent task: its options, and the Unix times before and after sending."""

    result: Any
    options: dict[str, Any]
    before: float
    after: float

    @property
    def id(self) -> str:
        return self.result.id

    def assert_on_time(self, run: Run, seconds: float) -> None:
        """Assert that it ran so long after it was sent, or at its ETA, which it sees."""
        latest = self.after + max(seconds, 0)
        if eta := self.options.get("eta"):
            assert run.eta == eta.isoformat()
            # A naive ETA is UTC in every time zone of the app.
            at = (eta if eta.tzinfo else eta.replace(tzinfo=UTC)).timestamp()
            run.assert_on_time(at, max(latest, at))
        else:
            run.assert_on_time(self.before + max(seconds, 0), latest)


def send(signature: Any, **options: Any) -> Sent:
    if "eta" in options:
        options["eta"] = options["eta"](datetime.now(UTC))
    before = time()
    return Sent(signature.apply_async(**options), options, before, time())


class Everything:
    """All tasks of this module, sent together."""

    def __init__(self, fleet: Fleet, app: Celery) -> None:
        self.fleet = fleet
        self.app = app
        self.started = time()
        task = app.tasks
        note = task["note"]

        def noted(*names: str) -> list[Any]:
            return [note.si(name) for name in names]

        def by_route(signature: Any, **how: Any) -> dict[str, Sent]:
            return {route: send(signature, **how, **options) for route, options in ROUTES.items()}

        self.undelayed = by_route(note.si("undelayed"))
        self.priority = send(note.si("undelayed, priority"), priority=7)
        self.expired = send(note.si("expired"), countdown=2, expires=1)
        self.delays = {name: send(note.si(name), **how) for name, how in DELAYS.items()}
        self.routes = by_route(note.si("delayed"), countdown=1)
        self.retries = by_route(task["again"].si(RETRIES, 0.3), countdown=0.5)
        for route, options in ROUTES.items():
            send(task["resend"].si(5, 0.3, options), headers={"customer": route}, **options)
        self.link = send(note.si("linking"), countdown=1, link=note.si("linked").set(countdown=1))
        steps = [step.set(countdown=1) for step in noted("link 1", "link 2", "link 3")]
        self.chain = send(chain(*steps))
        self.group = send(group(noted("member 1", "member 2", "member 3")), countdown=1)
        parts = [part.set(countdown=1) for part in noted("part 1", "part 2", "part 3")]
        self.chord = send(chord(parts, task["gather"].s("gathered").set(countdown=0.5)))
        self.skewed = send(group(noted("skew 1", "skew 2", "skew 3")).skew(step=0.5))

    def run_once(self, sent: Sent) -> Run:
        """The only run of a task."""
        (run,) = self.fleet.record.wait_for(task_id=sent.id)
        return run

    def noted(self, text: str) -> Run:
        """The only run of the task "note" with this argument."""

        def noted() -> list[Run] | None:
            return [
                run for run in self.fleet.record.runs(name="note") if run.args == [text]
            ] or None

        (run,) = wait_until(noted)
        return run


def delivery(run: Run) -> dict[str, Any]:
    """The delivery info that a run saw, but the priority."""
    ignored = {"redelivered", "priority"}
    return {k: v for k, v in run.delivery_info.items() if k not in ignored}


def assert_each_waited_and_went_the_same_way(runs: list[Run], undelayed: Run) -> None:
    """At least 0.3 s passed between consecutive runs."""
    for run in runs:
        assert run.worker == undelayed.worker
        assert delivery(run) == delivery(undelayed)
    for before, run in pairwise(runs):
        assert run.due >= before.started + 0.3
        run.assert_on_time()


@pytest.fixture(
    scope="module",
    params=[
        *ON_RABBITMQS,
        pytest.param("redis", marks=pytest.mark.redis),
    ],
)
def fleet(
    request: pytest.FixtureRequest,
    running_rabbitmq: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "results").mkdir()
    conf = {"result_backend": f"file://{folder}/results"}
    if request.param == "redis":
        url = request.getfixturevalue("redis").socket_url
    else:
        url = running_rabbitmq(installed_rabbitmq(request.param)).new_vhost()
    with fleet_on(url, folder, **conf) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def workers(fleet: Fleet) -> list[Worker]:
    """Two workers with different queues, so the worker of a run shows the queue."""
    queues = {"first": "default,orders,invoices,news", "second": "side,parcels"}
    workers = [fleet.worker(name=name, queues=its, wait=False) for name, its in queues.items()]
    for worker in workers:
        worker.wait_ready()
    return workers


@pytest.fixture(scope="module")
def everything(fleet: Fleet, workers: list[Worker]) -> Everything:
    return Everything(fleet, fleet.app())


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, fleet: Fleet) -> str:
    if not is_routable(request.param, fleet):
        pytest.skip("kombu's Redis transport knows no topic exchange by its name alone")
    return str(request.param)


def is_routable(route: str, fleet: Fleet) -> bool:
    """False for topic exchanges on Redis: kombu takes an undeclared exchange for a direct one."""
    return fleet.broker_url.startswith("amqp") or not route.startswith("topic")


def test_workers_hold_no_task_that_waits(everything: Everything, workers: list[Worker]) -> None:
    until = everything.started + 5  # the longest countdown
    while everything.fleet.held_by(*workers) == [] and time() < until:
        pass
    assert time() >= until


@pytest.mark.parametrize("name", DELAYS)
def test_a_delayed_task_runs_once_and_on_time(everything: Everything, name: str) -> None:
    sent = everything.delays[name]
    run = everything.run_once(sent)
    sent.assert_on_time(run, DELAYS[name].get("countdown", 0))
    undelayed = everything.run_once(everything.undelayed["no route"])
    assert delivery(run) == delivery(undelayed)
    assert run.eta is not None


def test_options_survive_the_delay(everything: Everything) -> None:
    undelayed = everything.run_once(everything.priority)
    assert everything.run_once(everything.delays["priority"]).delivery_info["priority"] == 7
    assert undelayed.delivery_info["priority"] == 7

    sent = everything.delays["expires after the delay"]
    run = everything.run_once(sent)
    expires = datetime.fromisoformat(run.expires).timestamp()
    assert sent.before <= expires - 60 <= sent.after

    run = everything.run_once(everything.delays["headers of one's own"])
    assert run.headers == {"customer": 7}
    assert everything.run_once(everything.delays["countdown=1"]).headers is None


def test_a_task_that_expires_before_it_is_due_is_revoked(everything: Everything) -> None:
    result = everything.expired.result
    wait_until(lambda: result.state == "REVOKED")
    assert everything.fleet.record.runs(task_id=result.id) == []


def test_a_delayed_task_goes_the_way_of_an_immediate_one(
    everything: Everything, route: str
) -> None:
    """A delayed task runs on time, with the worker and delivery info of an immediate one."""
    sent = everything.routes[route]
    run = everything.run_once(sent)
    sent.assert_on_time(run, 1)
    undelayed = everything.run_once(everything.undelayed[route])
    assert run.delivery_info == undelayed.delivery_info
    assert run.worker == undelayed.worker
    assert run.worker.startswith("second" if route in TO_SECOND else "first")


def test_a_retry_comes_back_to_its_queue(everything: Everything, route: str) -> None:
    sent = everything.retries[route]
    runs = everything.fleet.record.wait_for(RETRIES + 1, task_id=sent.id)
    assert [run.retries for run in runs] == list(range(RETRIES + 1))
    sent.assert_on_time(runs[0], 0.5)
    undelayed = everything.run_once(everything.undelayed[route])
    assert_each_waited_and_went_the_same_way(runs, undelayed)


def test_a_task_resent_with_received_headers_waits_again(
    everything: Everything, route: str
) -> None:
    def runs() -> list[Run]:
        found = everything.fleet.record.runs(name="resend")
        return [run for run in found if (run.headers or {}).get("customer") == route]

    wait_until(lambda: len(runs()) >= 6)
    assert [run.args[0] for run in runs()] == [5, 4, 3, 2, 1, 0]
    assert all(run.headers == {"customer": route} for run in runs())
    undelayed = everything.run_once(everything.undelayed[route])
    assert_each_waited_and_went_the_same_way(runs(), undelayed)


def test_links_and_chains_wait_for_the_task_before(everything: Everything) -> None:
    run = everything.run_once(everything.link)
    everything.link.assert_on_time(run, 1)
    everything.noted("linked").assert_on_time(run.started + 1)
    first, *others = (everything.noted(f"link {number}") for number in (1, 2, 3))
    everything.chain.assert_on_time(first, 1)
    for before, run in pairwise([first, *others]):
        run.assert_on_time(before.started + 1)


def test_groups_and_chords_wait(everything: Everything) -> None:
    """A skewed group, too."""
    for number, skew in ((1, 1), (2, 1.5), (3, 2)):
        everything.group.assert_on_time(everything.noted(f"member {number}"), 1)
        everything.skewed.assert_on_time(everything.noted(f"skew {number}"), skew)
        everything.chord.assert_on_time(everything.noted(f"part {number}"), 1)
    (body,) = everything.fleet.record.wait_for(name="gather")
    assert sorted(body.args[0]) == ["part 1", "part 2", "part 3"]
    last = max(everything.noted(f"part {number}").started for number in (1, 2, 3))
    # celery.chord_unlock looks every half second, and retries through the levels itself.
    body.assert_on_time(last + 0.5, last + 0.5 + 0.5)


def test_an_unroutable_task_does_not_arrive_with_a_delay_either(everything: Everything) -> None:
    record = everything.fleet.record
    expected = {route for route in ROUTES if is_routable(route, everything.fleet)}
    for sent in (everything.undelayed, everything.routes):
        assert {route for route in sent if record.runs(task_id=sent[route].id)} == expected


def test_nothing_ran_twice(everything: Everything) -> None:
    """The last test of the module, when any duplicate of an earlier task has had time to run."""
    attempts = [(run.id, run.retries) for run in everything.fleet.record.runs()]
    assert len(attempts) == len(set(attempts))
