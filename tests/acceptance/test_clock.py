"""The test clock beside a real worker: the same tasks run in the same order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from time import monotonic, sleep
from typing import Any

import pytest
from celery import Celery, chain, chord
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Ignore, Reject

from celery_native_delay import Delay, Rate, RetryAfter, install
from celery_native_delay.bulk import bulk
from celery_native_delay.clock import Clock
from celery_native_delay.testing import PrivateRedis
from tests.brokers import in_ci, installed_rabbitmq
from tests.waiting import SLOWNESS, wait_until

pytestmark = pytest.mark.redis

#: The seconds between two events whose order counts.
UNIT = 1.0 * SLOWNESS

#: After its last step no scenario takes more units than this.
LONGEST = 6

#: How often a worker plays a scenario in which it differs from the clock.
TRIES = 3

#: What a scenario does. It yields after which number of units it goes on.
Scenario = Callable[["Stage"], Iterator[float]]

SCENARIOS: dict[str, Scenario] = {}


def scenario(steps: Scenario) -> Scenario:
    SCENARIOS[steps.__name__] = steps
    return steps


class Stage:
    """The app and the tasks of one scenario, and what ran, in order."""

    def __init__(self, app: Celery, name: str, log: list[Any]) -> None:
        self.app, self.name, self.log = app, name, log
        self.delay = Delay(app)

    def s(self, what: Any = "", *, task: str = "note", units: float | None = None) -> Any:
        """The signature of a task that notes *what* after a countdown of *units*."""
        options = {} if units is None else {"countdown": units * UNIT}
        return self.app.tasks[task].si(self.name, what).set(**options)

    def send(self, what: Any = "", *, task: str = "note", units: float = 0, **options: Any) -> Any:
        countdown = units * UNIT if units else None
        return self.s(what, task=task).apply_async(countdown=countdown, **options)


def new_app(**settings: Any) -> tuple[Celery, dict[str, list[Any]]]:
    app = Celery("scenarios", set_as_current=False, **settings)
    app.conf.update(broker_connection_retry_on_startup=True, task_default_queue="scenarios")
    ran: dict[str, list[Any]] = defaultdict(list)

    def task(**options: Any) -> Any:
        def added(run: Any) -> Any:
            return app.task(name=run.__name__, shared=False, **options)(run)

        return added

    @task()
    def note(case: str, what: Any) -> Any:
        ran[case].append(what)
        return what

    @task()
    def rated(case: str, what: Any) -> None:
        ran[case].append(what)

    @task(bind=True, max_retries=None)
    def turned_away(self: Any, case: str, what: Any) -> None:
        ran[case].append((what, self.request.retries))
        if what == "held" and ran[case].count((what, 0)) == 1:
            raise RetryAfter(3 * UNIT)

    @task(bind=True)
    def flaky(self: Any, case: str, tries: int) -> None:
        ran[case].append(("try", self.request.retries))
        if self.request.retries < tries:
            raise self.retry(countdown=UNIT, max_retries=3)

    @task(bind=True)
    def hopeless(self: Any, case: str, what: Any) -> None:
        ran[case].append(("try", self.request.retries))
        raise self.retry(countdown=UNIT, max_retries=1, exc=LookupError(what))

    @task()
    def fail(case: str, what: Any) -> None:
        ran[case].append(what)
        raise LookupError(what)

    @task(bind=True)
    def replaces_itself(self: Any, case: str, what: Any) -> None:
        ran[case].append("replaced")
        raise self.replace(note.si(case, what).set(countdown=UNIT))

    @task()
    def ignores(case: str, what: Any) -> None:
        ran[case].append(what)
        raise Ignore

    @task(acks_late=True)
    def rejects(case: str, what: Any) -> None:
        ran[case].append(what)
        if len(ran[case]) < 3:
            raise Reject(what, requeue=True)

    @task(bind=True)
    def calls_unique(self: Any, case: str, what: Any) -> None:
        """A call for the key of the running task."""
        result = Delay(app).unique(calls_unique.si(case, "second"), key=case)
        ran[case].append((what, result.created))

    install(
        app,
        rates={
            "rated": Rate(f"1/{max(round(2 * UNIT), 1)}s", key="case"),
            "turned_away": Rate("100/s", key="case"),
        },
    )
    return app, ran


# ---- order and changes -----------------------------------------------------------------------


@scenario
def every_way_to_send(stage: Stage) -> Iterator[float]:
    stage.send(3, units=3, queue="side")
    stage.s(1).apply_async(eta=datetime.now(UTC) + timedelta(seconds=UNIT))
    with bulk(stage.app) as batch:
        for units in (4, 2):
            batch.send("note", (stage.name, units), countdown=units * UNIT)
    yield 0
    stage.send("at once")


@scenario
def waiting_tasks_change(stage: Stage) -> Iterator[float]:
    moved = stage.send("moved", units=2)
    cancelled = stage.send("never", units=2)
    now = stage.send("now", units=10)
    stage.send("other", units=3)
    yield 1
    stage.delay.reschedule(moved.id, countdown=3 * UNIT)
    stage.log.append(bool(stage.delay.cancel(cancelled.id)))
    stage.delay.run_now(now.id)
    yield 4
    stage.log.append((cancelled.state, bool(stage.delay.cancel(cancelled.id))))


# ---- tasks that send tasks -------------------------------------------------------------------


@scenario
def retries(stage: Stage) -> Iterator[float]:
    stage.send(2, task="flaky", units=1)
    result = stage.send(1, task="flaky")
    yield 6
    stage.log.append(result.state)


@scenario
def retries_that_end(stage: Stage) -> Iterator[float]:
    result = stage.send("x", task="hopeless", link_error=stage.s("error"))
    yield 6
    stage.log.append(result.state)


@scenario
def a_chain(stage: Stage) -> Iterator[float]:
    chain(stage.s("a", units=1), stage.s("b", units=2), stage.s("c")).apply_async()
    yield 2
    stage.log.append("between")


@scenario
def a_chord_whose_body_waits(stage: Stage) -> Iterator[float]:
    chord([stage.s(1, units=1), stage.s(2, units=2)], stage.s("body", units=2)).apply_async()
    yield 3
    stage.log.append("between")


@scenario
def a_chord_that_fails(stage: Stage) -> Iterator[float]:
    body = stage.s("body").on_error(stage.s("error"))
    chord([stage.s(1, units=2), stage.s("x", task="fail", units=1)], body).apply_async()
    yield 0


@scenario
def callbacks(stage: Stage) -> Iterator[float]:
    stage.send("first", units=1, link=stage.s("linked", units=1))
    stage.send("x", task="fail", units=3, link_error=stage.s("error"))
    yield 0


@scenario
def a_task_that_replaces_itself(stage: Stage) -> Iterator[float]:
    stage.send("instead", task="replaces_itself", units=1)
    yield 0


@scenario
def ignored_and_rejected(stage: Stage) -> Iterator[float]:
    stage.send("rejected", task="rejects", units=1)
    stage.send("ignored", task="ignores", units=3)
    yield 0


# ---- tasks that do not run -------------------------------------------------------------------


@scenario
def expiry(stage: Stage) -> Iterator[float]:
    expired = stage.send("never", units=2, expires=UNIT)
    stage.send("in time", units=1, expires=4 * UNIT)
    yield 4
    stage.log.append(expired.state)


@scenario
def a_cancelled_part_of_a_chain(stage: Stage) -> Iterator[float]:
    result = chain(stage.s("a", units=1), stage.s("b", units=2), stage.s("c")).apply_async()
    yield 2
    stage.delay.cancel(result.parent.id)
    yield 3
    stage.log.append(result.state)


# ---- keys ------------------------------------------------------------------------------------


@scenario
def debounce(stage: Stage) -> Iterator[float]:
    results = []
    for what in "abc":
        results.append(stage.delay.debounce(stage.s(what), key=stage.name, seconds=2 * UNIT))
        yield 1
    yield 2
    stage.log.append([result.state for result in results])


@scenario
def debounce_with_a_limit(stage: Stage) -> Iterator[float]:
    for what in "abcde":
        stage.delay.debounce(
            stage.s(what), key=stage.name, seconds=2 * UNIT, max_wait_seconds=3.5 * UNIT
        )
        yield 1


@scenario
def throttle_with_both_edges(stage: Stage) -> Iterator[float]:
    for what in "abc":
        stage.delay.throttle(stage.s(what), key=stage.name, seconds=4 * UNIT, edge="both")
        yield 1


@scenario
def unique(stage: Stage) -> Iterator[float]:
    for pause in (1, 2, 1, 0):  # calls at 0, 1, 3 and 4; the task of the first runs at 2
        signature = stage.s("ran", units=2)
        stage.log.append(stage.delay.unique(signature, key=stage.name).created)
        yield pause


@scenario
def unique_while_it_runs(stage: Stage) -> Iterator[float]:
    stage.delay.unique(stage.s("first", task="calls_unique", units=1), key=stage.name)
    yield 2
    stage.delay.unique(stage.s("third", task="calls_unique"), key=stage.name)


@scenario
def unique_until_start(stage: Stage) -> Iterator[float]:
    for what in "ab":
        stage.delay.unique(stage.s(what, units=2), key=stage.name, until="start")
        yield 1
    yield 1.2
    stage.delay.unique(stage.s("c"), key=stage.name, until="start")


# ---- rates -----------------------------------------------------------------------------------


@scenario
def a_rate(stage: Stage) -> Iterator[float]:
    for what in "abc":
        stage.send(what, task="rated")
    stage.send("without rate")
    yield 1
    stage.log.append("between")


@scenario
def a_rate_after_a_countdown(stage: Stage) -> Iterator[float]:
    stage.send("second", task="rated", units=2)
    stage.send("first", task="rated", units=1)
    yield 0


@scenario
def retry_after(stage: Stage) -> Iterator[float]:
    stage.send("held", task="turned_away")
    yield 1
    stage.send("behind", task="turned_away")
    stage.send("other")
    yield 0


# ---- the comparison --------------------------------------------------------------------------


def play(
    names: Iterable[str],
    app: Celery,
    ran: dict[str, list[Any]],
    now: Callable[[], float],
    wait: Callable[[float], object],
) -> None:
    """Play scenarios side by side. *now* and *wait* are in seconds."""
    plays = {name: SCENARIOS[name](Stage(app, name, ran[name])) for name in names}
    at = dict.fromkeys(plays, now())
    while at:
        name = min(at, key=lambda each: at[each])
        wait(max(at[name] - now(), 0))
        # From now: a busy machine makes a pause of a scenario longer, but none shorter.
        at[name] = now()
        try:
            at[name] += next(plays[name]) * UNIT
        except StopIteration:
            del at[name]
    wait(LONGEST * UNIT)


def on_the_clock() -> dict[str, list[Any]]:
    app, ran = new_app(broker="amqp://nowhere.invalid:1//", backend="redis://nowhere.invalid:1")
    with Clock(app, raises=False) as clock:
        now, wait = lambda: clock.now.timestamp(), lambda seconds: clock.advance(seconds=seconds)
        play(SCENARIOS, app, ran, now, wait)
    return ran


def in_a_worker(names: Iterable[str], url: str, **settings: Any) -> dict[str, list[Any]]:
    app, ran = new_app(broker=url, backend="cache+memory://")
    install(app, **settings)
    app.amqp.queues.select_add("side")
    with start_worker(app, pool="solo", perform_ping_check=False):
        # The first publish to each queue declares what the delayed message needs.
        first = Stage(app, "first", ran["first"])
        first.send(units=0.1, queue="side")
        first.delay.unique(first.s(units=0.1), key="first")
        wait_until(lambda: len(ran["first"]) == 2)
        del ran["first"]
        play(names, app, ran, monotonic, sleep)
    return ran


@pytest.mark.parametrize("broker", ["redis", in_ci("rabbitmq")])
def test_the_clock_does_as_a_worker_does(
    request: pytest.FixtureRequest, store_redis: PrivateRedis, broker: str
) -> None:
    """On a busy machine a worker may be late: what differs is played again, with less beside it."""
    simulated = on_the_clock()
    assert all(simulated[name] for name in SCENARIOS)
    differing: dict[str, Any] = dict(SCENARIOS)
    for _ in range(TRIES):
        store_redis.client.flushall()
        url, settings = store_redis.url, {}
        if broker == "rabbitmq":
            running = request.getfixturevalue("running_rabbitmq")
            url = running(installed_rabbitmq()).new_vhost()
            settings = {"store": store_redis.url}
        real = in_a_worker(differing, url, **settings)
        differing = {
            name: (simulated[name], real[name])
            for name in differing
            if simulated[name] != real[name]
        }
        if not differing:
            break
    assert differing == {}
