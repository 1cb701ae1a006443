"""The promises of debounce, throttle and unique, the same on every broker that can keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count, pairwise
from pathlib import Path
from threading import Barrier
from time import time
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from kombu import Connection, Queue

from celery_native_delay import (
    CannotDelay,
    Delay,
    DelayTooLong,
    InvalidDueTime,
    install,
)
from celery_native_delay.app.keyed import key_records
from celery_native_delay.keyed.record import HEADER, name_of
from celery_native_delay.keyed.records import KeyRecords
from celery_native_delay.testing import PrivateRedis
from celery_native_delay.transports.interface import Answer
from tests.brokers import in_ci
from tests.conformance.brokers import options_of, settings_of
from tests.conformance.traffic import SETTINGS, attended
from tests.traffic import Inbox

BROKERS = [
    pytest.param("rabbitmq-3.10", marks=pytest.mark.rabbitmq310),
    pytest.param("rabbitmq-4.3", marks=pytest.mark.rabbitmq43),
    pytest.param("redis", marks=pytest.mark.redis),
    in_ci("valkey"),
    "filesystem",
    in_ci("filesystem-postgresql"),
    in_ci("sqla"),
]

TASK = "shop.reindex"

#: Longer than any test takes, and than the levels of these tests are too short for.
LONG = 100.0


def reindexed(*args: Any) -> tuple[Any, ...]:
    return args


@pytest.fixture
def app(url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Celery]:
    """Installed, with results, and with a ledger beside RabbitMQ; what is due is handed over."""
    more: dict[str, Any] = settings_of(url)
    if url.startswith("amqp"):
        ledger: PrivateRedis = request.getfixturevalue("ledger_redis")
        more["ledger"] = ledger.url
    results = tmp_path / "results"
    results.mkdir()
    app = Celery("shop", broker=url, backend=f"file://{results}", set_as_current=False)
    app.conf.broker_transport_options = options_of(url)
    app.conf.task_default_queue = "jobs"
    app.task(name=TASK)(reindexed)
    with attended(url):
        yield install(app, **SETTINGS, **more)
        app.close()


@pytest.fixture
def delay(app: Celery) -> Delay:
    return Delay(app)


@pytest.fixture
def reindex(app: Celery) -> Any:
    return app.tasks[TASK]


class Counting(Inbox):
    """An inbox that leaves out what the ledger says must not run, as a worker does."""

    def __init__(self, connection: Any, settings: Any) -> None:
        super().__init__(connection)
        self.receipts = connection.default_channel.worker_part(settings).receipts()

    def receive(self, body: Any, message: Any) -> None:
        wait = message.native_delay
        asked = self.receipts if wait is not None else None
        if asked is None or asked.may_run(message.headers, wait) is Answer.RUN:
            super().receive(body, message)
        else:
            message.ack()

    @property
    def args(self) -> list[Any]:
        return [arrival.body[0][0] for arrival in self.arrivals]


@pytest.fixture
def jobs(app: Celery) -> Iterator[Counting]:
    """All that would run of what comes into the queue."""
    with app.connection_for_read() as connection:
        counting = Counting(connection, app._native_delay.settings())
        with connection.Consumer([Queue("jobs")], callbacks=[counting.receive]):
            yield counting
        if counting.receipts is not None:
            counting.receipts.close()


def waiting_ids(delay: Delay, *ids: str) -> set[str]:
    """Those of *ids* that wait."""
    return {task_id for task_id in ids if delay.show(task_id)}


def at_once(call: Callable[[int], str], callers: int = 4) -> list[str]:
    """The answers of as many *callers* that call at the same time, each with its number."""
    barrier = Barrier(callers)

    def calling(number: int) -> str:
        barrier.wait()
        return call(number)

    with ThreadPoolExecutor(callers) as pool:
        return list(pool.map(calling, range(callers)))


def name_for(kind: str, key: str) -> str:
    return name_of(kind, TASK, key)


@contextmanager
def records_of(app: Celery) -> Iterator[KeyRecords]:
    with app.connection_for_write() as connection:
        yield key_records(app, connection)


# ---- debounce -----------------------------------------------------------------------------------


def test_a_debounced_task_runs_once_it_has_been_quiet_with_the_last_arguments(
    delay: Delay, reindex: Any, jobs: Counting
) -> None:
    ids = []
    for number in range(10):
        ids.append(delay.debounce(reindex.s(number), key="user:7", seconds=0.6).id)
        other = delay.debounce(reindex.s(-1), key="user:8", seconds=0.6).id
    called = time()
    assert len(set(ids)) == 10
    assert jobs.receive_until(lambda: len(jobs.args) >= 2)
    assert sorted(jobs.args) == [-1, 9]
    arrived = {arrival.message.headers["id"]: arrival for arrival in jobs.arrivals}
    assert set(arrived) == {ids[-1], other}
    assert arrived[ids[-1]].at >= called + 0.6 - 0.1  # the last call took its time
    assert waiting_ids(delay, *ids) == set()


def test_a_debounced_task_waits_no_longer_than_it_may(
    delay: Delay, reindex: Any, jobs: Counting
) -> None:
    began, number = time(), count()
    while not jobs.arrivals and time() < began + 60:
        delay.debounce(reindex.s(next(number)), key="k", seconds=0.5, max_wait_seconds=1.5)
        jobs.receive_until(lambda: True)
    assert jobs.arrivals[0].at >= began + 1.4
    assert jobs.args[0] > 0


def test_what_is_replaced_is_forgotten_or_announced_with_the_reason(
    app: Celery, delay: Delay, reindex: Any
) -> None:
    first, second, third = (
        delay.debounce(reindex.s(number), key="k", seconds=LONG, announce=number == 2)
        for number in range(3)
    )
    assert first.state == "PENDING"
    assert second.state == "REVOKED"
    assert str(second.result) == f"replaced by {third.id}"
    assert waiting_ids(delay, first.id, second.id, third.id) == {third.id}


def test_what_waits_for_a_key_can_be_seen_and_changed_as_ever(
    delay: Delay, reindex: Any, jobs: Counting
) -> None:
    """And the next call knows: it takes out what was moved, and leaves what was cancelled."""
    first = delay.debounce(reindex.s(1), key="k", seconds=LONG)
    (task,) = delay.show(first)
    assert (task.name, task.queue, task.args) == (TASK, "jobs", "(1,)")
    assert delay.reschedule(first, countdown=LONG / 2)
    second = delay.debounce(reindex.s(2), key="k", seconds=LONG)
    assert waiting_ids(delay, first.id, second.id) == {second.id}
    assert delay.cancel(second)
    third = delay.debounce(reindex.s(3), key="k", seconds=LONG)
    assert waiting_ids(delay, second.id, third.id) == {third.id}
    assert delay.run_now(third)
    assert jobs.receive_until(lambda: 3 in jobs.args)
    fourth = delay.debounce(reindex.s(4), key="k", seconds=LONG)
    assert waiting_ids(delay, third.id, fourth.id) == {fourth.id}
    assert delay.run_now(fourth)
    assert jobs.receive_until(lambda: 4 in jobs.args)
    ran = [arrival for arrival in jobs.arrivals if not arrival.message.native_delay.cancelled]
    assert [arrival.body[0][0] for arrival in ran] == [3, 4]


def test_of_many_producers_one_is_the_last(delay: Delay, reindex: Any) -> None:
    ids: list[str] = []
    for _ in range(5):
        ids += at_once(
            lambda number: str(delay.debounce(reindex.s(number), key="k", seconds=LONG).id)
        )
        assert len(waiting_ids(delay, *ids)) == 1


# ---- throttle -----------------------------------------------------------------------------------


def test_the_first_of_a_window_runs_at_once_and_stands_for_the_others(
    delay: Delay, reindex: Any, jobs: Counting
) -> None:
    ids = at_once(lambda number: str(delay.throttle(reindex.s(number), key="k", seconds=LONG).id))
    assert len(set(ids)) == 1
    assert jobs.receive_until(lambda: jobs.arrivals)
    ids.append(delay.throttle(reindex.s(9), key="k", seconds=LONG).id)
    assert {arrival.message.headers["id"] for arrival in jobs.wait_for(1)} == set(ids)


def test_a_window_ends(delay: Delay, reindex: Any, jobs: Counting) -> None:
    began, number = time(), count()
    while len(jobs.arrivals) < 3 and time() < began + 60:
        delay.throttle(reindex.s(next(number)), key="k", seconds=0.4)
        jobs.receive_until(lambda: True)
    headers = [arrival.message.headers["eta"] for arrival in jobs.arrivals]
    starts = [datetime.fromisoformat(eta).timestamp() for eta in headers]
    assert all(later - former >= 0.4 for former, later in pairwise(starts))


def test_on_both_edges_the_first_and_the_last_run(
    delay: Delay, reindex: Any, jobs: Counting
) -> None:
    ids = [
        delay.throttle(reindex.s(number), key="k", seconds=0.8, edge="both").id
        for number in range(5)
    ]
    assert jobs.receive_until(lambda: len(jobs.args) >= 2)
    assert [arrival.message.headers["id"] for arrival in jobs.arrivals] == [ids[0], ids[-1]]
    assert jobs.args == [0, 4]


def test_on_the_trailing_edge_the_last_of_a_window_runs(delay: Delay, reindex: Any) -> None:
    before = time()
    ids = [
        delay.throttle(reindex.s(number), key="k", seconds=LONG, edge="trailing").id
        for number in range(3)
    ]
    assert waiting_ids(delay, *ids) == {ids[-1]}
    (task,) = delay.show(ids[-1])
    assert before + LONG - 1 <= task.due_us / 1e6
    assert delay.throttle(reindex.s(4), key="k", seconds=LONG).id not in ids  # another edge


# ---- unique -------------------------------------------------------------------------------------


@pytest.mark.parametrize("until", ["start", "end"])
def test_a_unique_task_stands_while_it_waits_and_while_it_is_in_its_queue(
    delay: Delay, reindex: Any, jobs: Counting, until: Any
) -> None:
    def call(number: int) -> str:
        return str(delay.unique(reindex.s(number), key="k", countdown=0.5, until=until).id)

    ids = at_once(call)
    assert len(set(ids)) == 1
    assert waiting_ids(delay, *ids) == set(ids)
    (arrival,) = jobs.wait_for(1)
    mark = {"v": 1, "key": name_for("unique", "k"), "until": until}
    assert arrival.message.headers[HEADER] == mark
    assert call(9) == ids[0]
    assert delay.unique(reindex.s(1), key="other", countdown=LONG).id not in ids


def test_a_unique_task_without_a_countdown_comes_at_once(
    delay: Delay, reindex: Any, jobs: Counting
) -> None:
    result = delay.unique(reindex.s(1), key="k")
    (arrival,) = jobs.wait_for(1)
    assert arrival.message.headers["id"] == result.id


def test_a_call_that_dies_before_its_message_is_there_has_not_taken_the_key(
    app: Celery, delay: Delay, reindex: Any
) -> None:
    """It is refused where the message is made: the record is written with it or not at all."""
    with pytest.raises(DelayTooLong):
        delay.unique(reindex.s(1), key="k", countdown=1e9)
    with records_of(app) as records:
        assert records.read(name_for("unique", "k")).record is None
    assert delay.show(delay.unique(reindex.s(1), key="k", countdown=LONG).id)


def test_options_of_a_signature_are_kept(delay: Delay, reindex: Any) -> None:
    signature = reindex.s(1).set(
        queue="invoices", headers={"tenant": "acme"}, expires=3600, task_id="mine", countdown=LONG
    )
    assert delay.unique(signature, key="k").id == "mine"
    (task,) = delay.show("mine")
    assert task.queue == "invoices"
    assert task.due_us / 1e6 >= time() + LONG - 10
    eta = datetime.now(UTC) + timedelta(seconds=LONG)
    other = delay.unique(reindex.s(1), key="other", eta=eta)
    assert abs(delay.show(other)[0].due_us / 1e6 - eta.timestamp()) <= 1


def test_a_name_that_no_producer_knows_can_be_sent_under_a_key(app: Celery, delay: Delay) -> None:
    signature = app.signature("elsewhere.task", args=(1,))
    result = delay.debounce(signature, key="k", seconds=LONG)
    assert delay.show(result)[0].name == "elsewhere.task"


# ---- what is refused ----------------------------------------------------------------------------


def test_what_cannot_stand_for_a_key_is_refused_in_plain_words(
    app: Celery, delay: Delay, reindex: Any
) -> None:
    several = [
        (group(reindex.s(1), reindex.s(2)), "a group"),
        (chain(reindex.s(1), reindex.s(2)), "a chain"),
        (chord([reindex.s(1)], reindex.s(2)), "a chord"),
    ]
    for signature, kind in several:
        with pytest.raises(TypeError, match=f"a single task, got {kind}"):
            delay.debounce(signature, key="k", seconds=1)
    with pytest.raises(TypeError, match=r"write reindex.s\(\)|write .*\.s\(\)"):
        delay.unique(reindex, key="k")
    with pytest.raises(TypeError, match="key to be a text such as"):
        delay.unique(reindex.s(), key=7)  # type: ignore[arg-type]
    for seconds in (0, -1, float("nan"), "5", True):
        with pytest.raises(InvalidDueTime, match="seconds to be a number above 0"):
            delay.debounce(reindex.s(), key="k", seconds=seconds)  # type: ignore[arg-type]
    with pytest.raises(InvalidDueTime, match="max_wait_seconds of at least seconds=5"):
        delay.debounce(reindex.s(), key="k", seconds=5, max_wait_seconds=1)
    with pytest.raises(ValueError, match="edge to be 'leading' or 'trailing' or 'both'"):
        delay.throttle(reindex.s(), key="k", seconds=5, edge="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="until to be 'start' or 'end'"):
        delay.unique(reindex.s(), key="k", until="now")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a signature without countdown"):
        delay.throttle(reindex.s().set(countdown=5), key="k", seconds=5)
    with pytest.raises(InvalidDueTime, match="expected countdown or eta"):
        delay.unique(reindex.s(), key="k", countdown=1, eta=datetime.now(UTC))
    app.conf.task_protocol = 1
    with pytest.raises(CannotDelay, match="task_protocol = 2"):
        Delay(app).debounce(reindex.s(), key="k", seconds=5)


def test_a_message_that_never_reaches_this_broker_is_told(
    app: Celery, delay: Delay, reindex: Any
) -> None:
    with Connection("memory://") as elsewhere:
        signature = reindex.s(1).set(connection=elsewhere)
        with pytest.raises(CannotDelay, match="leave out the options connection"):
            delay.debounce(signature, key="k", seconds=1)


def test_eagerly_it_runs_at_once(app: Celery, delay: Delay, reindex: Any) -> None:
    app.conf.task_always_eager = True
    assert delay.debounce(reindex.s(1), key="k", seconds=LONG).get() == (1,)
    assert delay.throttle(reindex.s(2), key="k", seconds=LONG).get() == (2,)
    assert delay.unique(reindex.s(3), key="k", countdown=LONG).get() == (3,)
