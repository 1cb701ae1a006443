"""Cancelling and rescheduling tasks while real workers run."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from time import sleep, time
from typing import Any

import pytest
from celery import Celery, chain, chord

from celery_native_delay import Delay
from celery_native_delay.testing import PrivateRedis, private_redis
from tests.acceptance.worker import Fleet, fleet_on
from tests.brokers import ON_SYSTEM, in_ci, on_one_version
from tests.traffic import beside
from tests.waiting import SLOWNESS, wait_until

#: Warnings about Celery's Redis backend: a deprecated call, and connections left open.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

#: Until the tasks of a test are due: longer than a worker takes to boot.
WAIT_SECONDS = 6.0 * SLOWNESS


@pytest.fixture(params=[f"{ON_SYSTEM.id}-redis", in_ci("redis")])
def fleet(
    request: pytest.FixtureRequest,
    fleet_at: Callable[..., Fleet],
    store_redis: PrivateRedis,
) -> Iterator[Fleet]:
    """Results are in another database of the Redis in which the tasks wait."""
    yield fleet_at(
        request.param,
        native_delay_levels=16,  # two hours
        result_backend=store_redis.url.replace("/0", "/1"),
        # Without it, a result deleted after the server would try to unsubscribe for minutes.
        result_backend_transport_options={"retry_policy": {"max_retries": 1}},
    )
    gc.collect()  # results unsubscribe


@contextmanager
def task_events(app: Celery) -> Iterator[dict[str, list[str]]]:
    """The types of task events that a monitor receives, by task."""
    seen: dict[str, list[str]] = defaultdict(list)

    def note(event: dict[str, Any]) -> None:
        if "uuid" in event:
            seen[event["uuid"]].append(event["type"])

    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": note})

        def stop() -> None:
            receiver.should_stop = True

        with beside(lambda: receiver.capture(limit=None, timeout=None), stop=stop):
            yield seen


class Cancelled:
    """Tasks of one queue, sent without a worker: some are cancelled, the others are not."""

    def __init__(self, app: Celery, delay: Delay, queue: str) -> None:
        note, careful, gather = (app.tasks[name] for name in ("note", "careful", "gather"))
        options = {"countdown": WAIT_SECONDS, "queue": queue}
        early = note.apply_async(("early",), **options)
        late = careful.apply_async(("late",), **options)
        header = [note.s("runs").set(**options), careful.s("does not").set(**options)]
        self.body = chord(header)(gather.s().set(queue=queue))
        runs, dropped = self.body.parent.results
        self.linked = chain(note.s("head").set(**options), careful.s().set(queue=queue))()
        options["countdown"] = WAIT_SECONDS + 1
        self.witness = note.apply_async(("witness",), **options).id
        self.running = {runs.id, self.witness}

        assert delay.cancel(early.id)
        late.revoke()
        app.control.revoke([dropped.id, self.linked.parent.id])
        self.cancelled = [early, late, dropped, self.linked.parent]
        assert self.states == ["REVOKED"] * 4

    @property
    def states(self) -> list[str]:
        return [result.state for result in self.cancelled]

    def everybody_knows(self, events: dict[str, list[str]]) -> bool:
        announced = all("task-revoked" in events[result.id] for result in self.cancelled)
        return announced and self.body.state == "FAILURE" and self.linked.state == "REVOKED"

    def assert_told_once(self, events: dict[str, list[str]]) -> None:
        for result in self.cancelled:
            assert events[result.id].count("task-revoked") == 1
            assert set(events[result.id]) <= {"task-received", "task-revoked"}
        assert self.states == ["REVOKED"] * 4


def test_a_cancelled_task_never_runs_and_its_result_and_events_say_so(fleet: Fleet) -> None:
    """Cancelled before a worker starts: acknowledged early or late, in a chord, in a chain."""
    pools = {"default": "prefork", "side": "threads", "invoices": "solo"}
    app = fleet.app()
    delay = Delay(app)
    sent = {queue: Cancelled(app, delay, queue) for queue in pools}
    with task_events(app) as events:
        workers = [
            fleet.worker(pool=pool, queues=queue, wait=False, more=("-E",))
            for queue, pool in pools.items()
        ]
        for each in sent.values():
            fleet.record.wait_for(task_id=each.witness)
            wait_until(partial(each.everybody_knows, events))
    assert {run.id for run in fleet.record.runs()} == {
        task_id for each in sent.values() for task_id in each.running
    }
    for each in sent.values():
        each.assert_told_once(events)
    for worker, queue in zip(workers, pools, strict=True):
        worker.stop()
        assert fleet.depth(queue) == 0
        assert len(worker.log_lines("Chord", "raised: ChordError")) == 1


def test_a_task_tells_its_story_from_its_wait_to_its_end(fleet: Fleet) -> None:
    """Who sent it, where it waits, what is wrong; which worker has it; how it ended."""
    app = fleet.app()
    delay = Delay(app)
    failing = app.send_task("hold", ("no number",), countdown=1, task_id="failing")
    sender, waits = delay.story("failing")[:2]
    assert sender.startswith("sent by gen")
    assert (" for the queue default, due in " in waits) != ("due since" in waits)
    wait_until(lambda: any("promotes" in said for said in delay.story("failing")))
    fleet.worker(name="first")
    wait_until(failing.ready)
    assert delay.story("failing")[-1].startswith("its result is FAILURE at 20")
    app.send_task("hold", (3 * WAIT_SECONDS,), task_id="running")
    wait_until(lambda: "has it: active since 20" in " ".join(delay.story("running")))
    assert "the worker first-" in " ".join(delay.story("running"))
    assert "not found. It may be" in delay.story("unknown")[0]


def test_a_rescheduled_task_runs_once_at_the_last_accepted_time(fleet: Fleet) -> None:
    """Rescheduled earlier, later, twice, and at the moment when it becomes due."""
    app = fleet.app()
    delay = Delay(app)
    note = app.tasks["note"]
    fleet.worker(pool="solo")
    due: dict[str, float] = {}
    sooner, later, twice, now = (
        note.apply_async((seconds,), countdown=seconds) for seconds in (3600, 8, 3600, 3600)
    )
    (shown,) = delay.ls(limit=1)
    assert shown.id == later.id
    assert shown.due == delay.next_due()
    moves = (sooner, [2]), (later, [9]), (twice, [7200, 2.5]), (now, [])
    for result, countdowns in moves:
        for countdown in countdowns:
            assert delay.reschedule(result.id, countdown=countdown)
        if not countdowns:
            assert delay.run_now(result.id)
        (task,) = delay.show(result.id) or [None]
        due[result.id] = time() if task is None else task.due_us / 1e6

    accepted = 0
    begin = datetime.now(UTC) + timedelta(seconds=2)
    raced = [
        note.apply_async((number,), eta=begin + timedelta(seconds=number * 0.06))
        for number in range(40)
    ]
    for number, result in enumerate(raced):
        # From 80 ms before it is due until 40 ms after.
        due[result.id] = (begin + timedelta(seconds=number * 0.06)).timestamp()
        sleep(max(due[result.id] - 0.08 + 0.003 * number - time(), 0))
        moment = begin + timedelta(seconds=6 + number * 0.01)
        if delay.reschedule(result.id, eta=moment):
            due[result.id] = moment.timestamp()
            accepted += 1
    assert accepted, "every race was lost"

    fleet.record.wait_for_ids(list(due))
    # The worker receives and drops cancelled messages at most a second after the last run.
    wait_until(lambda: time() > max(due.values()) + 1)
    found = fleet.record.wait_for_ids(list(due))
    for task_id, runs in found.items():
        assert len(runs) == 1, (task_id, runs)
        earliest = due[task_id] - 1 if task_id == now.id else due[task_id]
        runs[0].assert_on_time(earliest, due[task_id])


@on_one_version
@pytest.mark.ci
def test_due_tasks_wait_while_the_store_is_unreachable(vhost_url: str, tmp_path: Path) -> None:
    """A cancelled task never runs; the other one runs as soon as the store is reachable again."""
    with private_redis() as store:
        conf = {"native_delay_store": store.url, "native_delay_store_tasks": ["nothing"]}
        with fleet_on(vhost_url, tmp_path, **conf) as fleet:
            app = fleet.app()
            fleet.worker(pool="solo")
            kept, dropped = (app.tasks["note"].apply_async((n,), countdown=3) for n in (1, 2))
            due = time() + 3
            assert Delay(app).cancel(dropped.id)
            store.kill()
            sleep(max(due + 1 - time(), 0))
            assert fleet.record.runs() == []
            store.start()
            fleet.record.wait_for(task_id=kept.id)
            assert {run.id for run in fleet.record.runs()} == {kept.id}
