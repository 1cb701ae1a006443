"""Everything Celery can delay, sent in one go, and what is true of it over any broker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from time import time
from typing import Any

from celery import Celery, chain, chord, group

from tests.acceptance.worker import Fleet, Run, Worker
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

#: Who consumes the only queue that a route leads to.
WORKER_OF = dict.fromkeys(ROUTES, "first") | {
    "queue": "second",
    "topic exchange, wildcard": "second",
}


@dataclass(frozen=True)
class Delay:
    """Options that delay a task, given the time, and by how many seconds."""

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
    """A task, its options, and the Unix times between which it was sent."""

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
    """All tasks, sent in one go."""

    def __init__(self, fleet: Fleet, app: Celery) -> None:
        self.fleet = fleet
        self.app = app
        self.started = time()
        task = app.tasks
        note = task["note"]

        def noted(*names: str) -> list[Any]:
            return [note.si(name) for name in names]

        self.undelayed = {
            route: send(note.si(f"undelayed, {route}"), **options)
            for route, options in ROUTES.items()
        }
        self.priority = send(note.si("undelayed, priority"), priority=7)
        self.expired = send(note.si("expired"), countdown=2, expires=1)
        self.delays = {
            name: send(note.si(name), **delay.options(datetime.now(UTC)))
            for name, delay in DELAYS.items()
        }
        self.routes = {
            route: send(note.si(route), countdown=1, **options) for route, options in ROUTES.items()
        }
        self.retries = {
            route: send(task["again"].si(RETRIES, 0.3), countdown=0.5, **options)
            for route, options in ROUTES.items()
        }
        self.autoretries = {
            route: send(task["busy"].si(RETRIES), countdown=0.5, **options)
            for route, options in ROUTES.items()
        }
        self.resent = {
            route: send(task["resend"].si(5, 0.3, options), headers={"customer": route}, **options)
            for route, options in ROUTES.items()
        }
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
        """The only run of "note" with this argument."""

        def noted() -> list[Run] | None:
            found = [run for run in self.fleet.record.runs(name="note") if run.args == [text]]
            return found or None

        (run,) = wait_until(noted)
        return run

    # ---- true over any broker ------------------------------------------------------------

    def assert_none_held_by(self, workers: list[Worker]) -> None:
        """While tasks wait, no worker has one."""
        names = [worker.name for worker in workers]
        inspect = self.app.control.inspect(destination=names, timeout=5)
        until = self.started + 5  # the longest countdown
        answers = 0

        def all_were_due() -> bool:
            nonlocal answers
            replies = inspect.scheduled() or {}
            answers += len(replies)
            assert [held for held in replies.values() if held] == []
            return bool(answers) and time() >= until

        wait_until(all_were_due)

    def assert_arrived_as_undelayed(self, route: str) -> None:
        """In time, at the same worker, with the same delivery."""
        sent = self.routes[route]
        run = self.run_once(sent)
        run.assert_on_time(sent.before + 1, sent.after + 1)
        undelayed = self.run_once(self.undelayed[route])
        assert run.delivery_info == undelayed.delivery_info
        assert run.worker == undelayed.worker
        assert run.worker.startswith(WORKER_OF[route])

    def assert_retried(self, route: str) -> None:
        """Every time on the same way, each in time."""
        sent = self.retries[route]
        runs = self.fleet.record.wait_for(RETRIES + 1, task_id=sent.id)
        assert [run.retries for run in runs] == list(range(RETRIES + 1))
        runs[0].assert_on_time(sent.before + 0.5, sent.after + 0.5)
        assert_same_way(runs, self.run_once(self.undelayed[route]))
        for before, run in pairwise(runs):
            assert run.due is not None
            assert run.due >= before.started + 0.3
            run.assert_on_time(run.due)


def started_workers(fleet: Fleet) -> list[Worker]:
    """Two, so that a run tells by its worker from which queues it came."""
    workers = [
        fleet.worker(
            name="first", queues="default,orders,invoices,news", concurrency=3, wait=False
        ),
        fleet.worker(name="second", queues="side,parcels", concurrency=2, wait=False),
    ]
    for worker in workers:
        worker.wait_ready()
    return workers


def same_delivery(run: Run, undelayed: Run) -> bool:
    """Whether a task sees the same delivery, but for its priority."""
    ignored = {"redelivered", "priority"}
    return {k: v for k, v in run.delivery_info.items() if k not in ignored} == {
        k: v for k, v in undelayed.delivery_info.items() if k not in ignored
    }


def due(sent: Sent) -> float:
    """Unix time of an eta; a naive one is UTC, whatever the app's time zone."""
    eta: datetime = sent.options["eta"]
    return (eta if eta.tzinfo else eta.replace(tzinfo=UTC)).timestamp()


def assert_same_way(runs: list[Run], undelayed: Run) -> None:
    for run in runs:
        assert run.worker == undelayed.worker
        assert same_delivery(run, undelayed)
