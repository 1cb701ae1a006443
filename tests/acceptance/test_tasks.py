"""Every way to delay a task in Celery: it runs once, on time, and otherwise as without a delay.

All tasks are sent before the first test looks, so that their waits overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from time import time
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.result import AsyncResult, GroupResult

from celery_native_delay.testing import private_redis, require_redis, vhost_name
from pytest_celery_native_delay import installed
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

#: The worker that consumes the only queue of a route.
WORKER_OF = dict.fromkeys(ROUTES, "first") | {
    "queue": "second",
    "topic exchange, wildcard": "second",
}


@dataclass(frozen=True)
class Delay:
    """The options of a delayed task, computed from the current time, and its delay in seconds."""

    options: Callable[[datetime], dict[str, Any]]
    seconds: float


def countdown(seconds: float, **more: Any) -> Delay:
    return Delay(lambda now: {"countdown": seconds} | more, max(seconds, 0))


DELAYS: dict[str, Delay] = {
    "countdown=0.3": countdown(0.3),
    "countdown=1": countdown(1),
    "countdown=1.5": countdown(1.5),
    "countdown=5": countdown(5),
    "negative countdown": countdown(-10),
    "aware eta": Delay(lambda now: {"eta": now + timedelta(seconds=2)}, 2),
    "aware eta elsewhere": Delay(lambda now: {"eta": (now + timedelta(seconds=2)).astimezone()}, 2),
    "naive eta": Delay(lambda now: {"eta": now.replace(tzinfo=None) + timedelta(seconds=2)}, 2),
    "eta in the past": Delay(lambda now: {"eta": now - timedelta(hours=1)}, 0),
    "expires after the delay": countdown(1, expires=60),
    "priority": countdown(1, priority=7),
    "headers of one's own": countdown(1, headers={"customer": 7}),
}


@dataclass(frozen=True)
class Sent:
    """A sent task: its options, and the Unix times before and after sending."""

    id: str
    result: Any
    options: dict[str, Any]
    before: float
    after: float


def send(signature: Any, **options: Any) -> Sent:
    before = time()
    result = signature.apply_async(**options)
    return Sent(result.id, result, options, before, time())


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
        self.delays = {
            name: send(note.si(name), **delay.options(datetime.now(UTC)))
            for name, delay in DELAYS.items()
        }
        self.routes = by_route(note.si("delayed"), countdown=1)
        self.retries = by_route(task["again"].si(RETRIES, 0.3), countdown=0.5)
        for route, options in ROUTES.items():
            send(task["resend"].si(5, 0.3, options), headers={"customer": route}, **options)
        self.link = send(note.si("linking"), countdown=1, link=note.si("linked").set(countdown=1))
        self.chain = send(
            chain(*[step.set(countdown=1) for step in noted("link 1", "link 2", "link 3")])
        )
        self.group = send(group(noted("member 1", "member 2", "member 3")), countdown=1)
        self.chord = send(
            chord(
                [part.set(countdown=1) for part in noted("part 1", "part 2", "part 3")],
                task["gather"].s("gathered").set(countdown=0.5),
            )
        )
        self.skewed = send(group(noted("skew 1", "skew 2", "skew 3")).skew(step=0.5))

    def run_once(self, sent: Sent) -> Run:
        """The only run of a task."""
        (run,) = self.fleet.record.wait_for(task_id=sent.id)
        return run

    def noted(self, text: str) -> Run:
        """The only run of the task "note" with this argument."""

        def noted() -> list[Run] | None:
            found = [run for run in self.fleet.record.runs(name="note") if run.args == [text]]
            return found or None

        (run,) = wait_until(noted)
        return run


def same_delivery(run: Run, undelayed: Run) -> bool:
    """True if two runs saw the same delivery info, priority excepted."""
    ignored = {"redelivered", "priority"}
    return {k: v for k, v in run.delivery_info.items() if k not in ignored} == {
        k: v for k, v in undelayed.delivery_info.items() if k not in ignored
    }


def due(sent: Sent) -> float:
    """The Unix time of an ETA; a naive ETA is UTC in every time zone of the app."""
    eta: datetime = sent.options["eta"]
    return (eta if eta.tzinfo else eta.replace(tzinfo=UTC)).timestamp()


def assert_same_way(runs: list[Run], undelayed: Run) -> None:
    for run in runs:
        assert run.worker == undelayed.worker
        assert same_delivery(run, undelayed)


def assert_each_waited(runs: list[Run]) -> None:
    """Assert that at least 0.3 s passed between consecutive runs."""
    for before, run in pairwise(runs):
        assert run.due is not None
        assert run.due >= before.started + 0.3
        run.assert_on_time(run.due)


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
        installed(require_redis, "redis")
        with private_redis(server="redis") as redis:
            with fleet_on(redis.socket_url, folder, **conf) as fleet:
                yield fleet
    else:
        rabbitmq = running_rabbitmq(installed_rabbitmq(request.param))
        url = rabbitmq.new_vhost()
        with fleet_on(url, folder, **conf) as fleet:
            yield fleet
        rabbitmq.delete_vhost(vhost_name(url))


@pytest.fixture(scope="module")
def workers(fleet: Fleet) -> list[Worker]:
    """Two workers with different queues, so the worker of a run shows the queue."""
    workers = [
        fleet.worker(
            name="first", queues="default,orders,invoices,news", concurrency=3, wait=False
        ),
        fleet.worker(name="second", queues="side,parcels", concurrency=2, wait=False),
    ]
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


def test_the_worker_holds_nothing_while_tasks_wait(
    everything: Everything, workers: list[Worker]
) -> None:
    names = [worker.name for worker in workers]
    inspect = everything.app.control.inspect(destination=names)
    until = everything.started + 5  # the longest countdown
    answers = 0

    def all_were_due() -> bool:
        nonlocal answers
        replies = inspect.scheduled() or {}
        answers += len(replies)
        assert [held for held in replies.values() if held] == []
        return bool(answers) and time() >= until

    wait_until(all_were_due)


@pytest.mark.parametrize("name", DELAYS)
def test_a_delayed_task_runs_once_and_on_time(everything: Everything, name: str) -> None:
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
    wait_until(lambda: result.state == "REVOKED")
    assert everything.fleet.record.runs(task_id=result.id) == []


def test_a_delayed_task_takes_the_route_of_an_immediate_one(
    everything: Everything, route: str
) -> None:
    """A delayed task runs on time, with the worker and delivery info of an immediate one."""
    sent = everything.routes[route]
    run = everything.run_once(sent)
    run.assert_on_time(sent.before + 1, sent.after + 1)
    undelayed = everything.run_once(everything.undelayed[route])
    assert run.delivery_info == undelayed.delivery_info
    assert run.worker == undelayed.worker
    assert run.worker.startswith(WORKER_OF[route])


def test_a_retry_comes_back_to_its_queue(everything: Everything, route: str) -> None:
    sent = everything.retries[route]
    runs = everything.fleet.record.wait_for(RETRIES + 1, task_id=sent.id)
    assert [run.retries for run in runs] == list(range(RETRIES + 1))
    runs[0].assert_on_time(sent.before + 0.5, sent.after + 0.5)
    assert_same_way(runs, everything.run_once(everything.undelayed[route]))
    assert_each_waited(runs)


def test_a_task_resent_with_its_received_headers_waits_again(
    everything: Everything, route: str
) -> None:
    def runs() -> list[Run]:
        found = everything.fleet.record.runs(name="resend")
        return [run for run in found if (run.headers or {}).get("customer") == route]

    wait_until(lambda: len(runs()) >= 6)
    assert [run.args[0] for run in runs()] == [5, 4, 3, 2, 1, 0]
    assert_same_way(runs(), everything.run_once(everything.undelayed[route]))
    assert {str(run.headers) for run in runs()} == {str({"customer": route})}
    assert_each_waited(runs())


def test_a_link_runs_after_its_delayed_task(everything: Everything) -> None:
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


def test_a_skewed_group_waits(everything: Everything) -> None:
    sent = everything.skewed
    assert isinstance(sent.result, GroupResult)
    for number, seconds in ((1, 1), (2, 1.5), (3, 2)):
        run = everything.noted(f"skew {number}")
        run.assert_on_time(sent.before + seconds, sent.after + seconds)


def test_an_unroutable_task_does_not_arrive_with_a_delay_either(everything: Everything) -> None:
    record = everything.fleet.record
    expected = {route for route in ROUTES if is_routable(route, everything.fleet)}
    for sent in (everything.undelayed, everything.routes):
        assert {route for route in sent if record.runs(task_id=sent[route].id)} == expected


def test_nothing_ran_twice(everything: Everything) -> None:
    """The last test of the module, when any duplicate of an earlier task has had time to run."""
    attempts = [(run.id, run.retries) for run in everything.fleet.record.runs()]
    assert len(attempts) == len(set(attempts))
