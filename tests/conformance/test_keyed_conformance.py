"""Debounce, throttle and unique on every broker, beside a store where it needs one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from time import time
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, chain, chord, group
from kombu import Connection, Queue

from celery_native_delay import (
    CannotDelay,
    Debounce,
    Delay,
    DelayTooLong,
    InvalidDueTime,
    KeyedResult,
    NoStore,
    SettingsError,
    Throttle,
    Unique,
    UnsupportedBroker,
    Verdict,
    install,
)
from celery_native_delay.app.installation import delaying_channel
from celery_native_delay.app.keyed import key_records
from celery_native_delay.bulk import bulk
from celery_native_delay.keyed.record import HEADER, name_of
from celery_native_delay.keyed.rules import Seen
from celery_native_delay.message import Delayed
from celery_native_delay.transports.interface import Wait
from tests.conformance.brokers import Broker, needs_store, options_of, settings_of, without
from tests.conformance.traffic import SETTINGS, at_once, installed_app
from tests.traffic import Inbox
from tests.waiting import PATIENCE_SECONDS

#: A store beside SQS is one beside any broker that kombu's virtual transports serve: the tests of
#: what SQS has a part in run on it, too.
BROKERS = without("valkey", "sqs")
also_on_sqs = pytest.mark.parametrize("broker", without("valkey"), indirect=True, scope="session")

TASK = "shop.reindex"

#: Longer than any test takes, and within the longest delay.
LONG = 100.0


def imported(file: str, at: int = 0) -> None: ...


def reindexed(*args: Any) -> tuple[Any, ...]:
    return args


@pytest.fixture(scope="module")
def app(
    broker: Broker, new_store: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Celery]:
    url = broker.new_space()
    with installed_app(url, tmp_path_factory.mktemp("results"), new_store) as app:
        app.task(name=TASK, shared=False)(reindexed)
        yield app
    broker.remove_space(url)


@pytest.fixture
def key(app: Celery, broker: Broker) -> Iterator[str]:
    """A key for one test; deletes waiting messages and empties the queue afterwards."""
    yield uuid4().hex
    app.conf.update(task_always_eager=False, task_protocol=2)
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        channel.admin_part(app._native_delay.settings()).purge()
        if app.conf.broker_url.startswith("sqs://"):  # which purges a queue once a minute
            broker.wipe(app.conf.broker_url)
            return
        Queue("jobs")(channel).declare()
        channel.queue_purge("jobs")


@pytest.fixture
def delay(app: Celery) -> Delay:
    return Delay(app)


@pytest.fixture
def reindex(app: Celery) -> Any:
    return app.tasks[TASK]


@dataclass
class Counting(Inbox):
    """An inbox that knows the first argument of each task, without those of an earlier *key*.

    A dispatcher that had them in hand publishes them after their test emptied the queue, and so it
    announces cancelled ones.
    """

    key: str = ""

    def receive(self, body: Any, message: Any) -> None:
        waited: Delayed | None = getattr(message, "native_delay", None)
        mark = message.headers.get(HEADER)
        is_announced = mark is None and waited is not None and waited.cancelled
        if is_announced or (mark is not None and self.key not in mark["key"]):
            message.ack()
        else:
            super().receive(body, message)

    @property
    def args(self) -> list[Any]:
        return [arrival.body[0][0] for arrival in self.arrivals]


@pytest.fixture
def jobs(app: Celery, key: str) -> Iterator[Counting]:
    """The arriving messages that a worker would run."""
    with app.connection_for_read() as connection:
        counting = Counting(connection, key=key)
        with connection.Consumer([Queue("jobs")], callbacks=[counting.receive]):
            yield counting


def waiting_ids(delay: Delay, *ids: str) -> set[str]:
    """The *ids* whose tasks are waiting."""
    return {*delay.ids()} & {*ids}


def read(app: Celery, kind: str, key: str) -> Seen:
    with app.connection_for_write() as connection:
        return key_records(app, connection).read(name_of(kind, TASK, key))


# ---- debounce -----------------------------------------------------------------------------------


@also_on_sqs
def test_a_debounced_task_runs_with_the_last_arguments_after_a_quiet_period(
    key: str, delay: Delay, reindex: Any, jobs: Counting
) -> None:
    results: list[KeyedResult] = []
    for number in range(10):
        called = time()
        results.append(delay.debounce(reindex.s(number), key=key, seconds=0.6))
        other = delay.debounce(reindex.s(-1), key=f"{key}-other", seconds=0.6).id
    ids = [result.id for result in results]
    assert all(result.created for result in results)
    assert [result.replaced for result in results] == [None, *ids[:-1]]
    assert len(set(ids)) == 10
    assert jobs.receive_until(lambda: len(jobs.args) >= 2)
    assert sorted(jobs.args) == [-1, 9]
    arrived = {arrival.message.headers["id"]: arrival for arrival in jobs.arrivals}
    assert set(arrived) == {ids[-1], other}
    mark = {"v": 1, "kind": "debounce", "key": key}
    assert arrived[ids[-1]].message.headers[HEADER] == mark
    assert arrived[ids[-1]].at >= called + 0.6 - 0.01
    assert waiting_ids(delay, *ids) == set()


def test_a_debounced_task_waits_no_longer_than_max_wait_seconds(
    key: str, delay: Delay, reindex: Any, jobs: Counting
) -> None:
    began, number = time(), count()
    while not jobs.arrivals and time() < began + 60:
        delay.debounce(reindex.s(next(number)), key=key, seconds=2, max_wait_seconds=3)
        jobs.receive_until(lambda: True)
    assert jobs.arrivals[0].at >= began + 2.9
    assert jobs.args[0] > 0


def test_a_replaced_task_becomes_revoked_only_if_it_is_announced(
    key: str, app: Celery, delay: Delay, reindex: Any
) -> None:
    first, second, third = (
        delay.debounce(reindex.s(number), key=key, seconds=LONG, announce=number == 2)
        for number in range(3)
    )
    assert first.state == "PENDING"
    assert second.state == "REVOKED"
    assert str(second.result) == f"replaced by {third.id}"
    assert waiting_ids(delay, first.id, second.id, third.id) == {third.id}


def test_a_keyed_task_can_be_shown_moved_cancelled_and_run(
    key: str, delay: Delay, reindex: Any, jobs: Counting
) -> None:
    """The next call then replaces a moved task, and ignores a cancelled one."""
    first = delay.debounce(reindex.s(1), key=key, seconds=LONG)
    (task,) = delay.show(first)
    assert (task.name, task.queue, task.args) == (TASK, "jobs", "(1,)")
    assert delay.reschedule(first, countdown=LONG / 2)
    second = delay.debounce(reindex.s(2), key=key, seconds=LONG)
    assert waiting_ids(delay, first.id, second.id) == {second.id}
    assert delay.cancel(second)
    third = delay.debounce(reindex.s(3), key=key, seconds=LONG)
    assert waiting_ids(delay, second.id, third.id) == {third.id}
    assert delay.run_now(third)
    assert jobs.receive_until(lambda: 3 in jobs.args)
    fourth = delay.debounce(reindex.s(4), key=key, seconds=LONG)
    assert waiting_ids(delay, third.id, fourth.id) == {fourth.id}
    assert delay.run_now(fourth)
    assert jobs.receive_until(lambda: 4 in jobs.args)
    ran = [arrival for arrival in jobs.arrivals if not arrival.message.native_delay.cancelled]
    assert [arrival.body[0][0] for arrival in ran] == [3, 4]


def test_tasks_are_searched_and_cancelled_by_key(
    key: str, delay: Delay, reindex: Any, jobs: Counting
) -> None:
    key = f"käse:{key}"
    calls: dict[Any, KeyedResult] = {
        "debounce": delay.debounce(reindex.s(1), key=key, seconds=LONG),
        "throttle-trailing": delay.throttle(reindex.s(2), key=key, seconds=LONG, edge="trailing"),
        "unique": delay.unique(reindex.s(3), key=key, countdown=LONG),
    }
    delay.throttle(reindex.s(4), key=key, seconds=LONG, edge="both")
    calls["throttle"] = delay.throttle(reindex.s(5), key=key, seconds=LONG, edge="both")
    plain = reindex.apply_async((key,), countdown=LONG)
    assert jobs.receive_until(lambda: 4 in jobs.args)
    found = {task.kind: task for task in delay.ls(f"key:{key.upper()}")}
    assert {kind: task.id for kind, task in found.items()} == {
        kind: result.id for kind, result in calls.items()
    }
    assert {task.key for task in found.values()} == {key}
    told = found["unique"].as_json()
    assert (told["key"], told["kind"]) == (key, "unique")
    assert {*delay.ids(key)} == {plain.id, *(result.id for result in calls.values())}
    (other,) = delay.show(plain)
    assert (other.key, other.kind) == ("", "")
    for task, (kind, result) in zip((TASK, reindex, reindex.s(), TASK), calls.items(), strict=True):
        outcome = delay.cancel(key=key, task=task, kind=kind)
        assert outcome
        assert outcome.id == result.id
        assert result.state == "REVOKED"
        assert not delay.cancel(key=key, task=task, kind=kind)
    assert waiting_ids(delay, *(result.id for result in calls.values())) == set()
    assert waiting_ids(delay, plain.id) == {plain.id}
    nothing = delay.cancel(key=f"{key}-other", task=TASK, kind="unique")
    assert (nothing.id, nothing.verdict) == ("", Verdict.UNKNOWN)
    assert str(nothing) == f"nothing waits for key '{key}-other' of {TASK} (unique)"


def test_callers_of_a_task_with_a_declared_key_keep_delay(
    key: str, app: Celery, delay: Delay
) -> None:
    """Declared at the task, or in the settings; with and without the key's argument."""

    @app.task(name=f"shop.declared-{key}", key=Debounce(key="user", seconds=LONG))
    def declared(user: str | None, page: int = 0) -> None: ...

    first, last = declared.delay(key, 1), declared.delay(user=key, page=2)
    assert last.replaced == first.id
    (task,) = delay.ls(f"key:{key}")
    assert (task.id, task.kind, task.key) == (last.id, "debounce", key)
    assert task.kwargs == f"{{'user': '{key}', 'page': 2}}"
    assert declared.si(key).apply_async().replaced == last.id
    other = declared.apply_async((None, 3), countdown=LONG)
    assert not isinstance(other, KeyedResult), "None is no key"
    with pytest.raises(TypeError, match="countdown"):
        declared.apply_async((key,), countdown=5)
    with pytest.raises(CannotDelay, match="outside of a group or chord"):
        group(declared.si(key), declared.si(key)).apply_async()
    assert delay.cancel(key=key, task=declared, kind="debounce")
    assert delay.cancel(other)
    ids = [f"{key}-{page}" for page in range(3)]
    with bulk(app) as outbox:
        for page, task_id in enumerate(ids):
            outbox.send(declared, (None, page), countdown=LONG, task_id=task_id)
        with pytest.raises(CannotDelay, match="sends no task with a key: call its delay"):
            outbox.send(declared, (key, 3))
    assert outbox.result.by_template == 0, "a copy would have no key"
    assert all(delay.cancel_all(ids))

    by_name = f"shop.named-{key}"
    app.task(name=by_name)(imported)
    install(app, keys={by_name: Unique(key="file"), "shop.x": Throttle("file", 5)})
    sent = app.send_task(by_name, (key,), countdown=LONG)
    assert app.tasks[by_name].apply_async((key,), {"at": 1}).id == sent.id
    assert delay.count(f"key:{key}") == 1
    assert delay.cancel(sent)
    with pytest.raises(SettingsError, match="Debounce"):
        install(app, keys={by_name: "file"})  # type: ignore[dict-item]
    install(app, keys={})


def test_a_cancel_by_key_also_cancels_a_task_that_replaces_another_meanwhile(
    key: str, delay: Delay, reindex: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancel has read the record before the other call replaces its task."""
    first = delay.debounce(reindex.s(1), key=key, seconds=LONG)
    replacing = iter([2, 3])
    cancel_all = Delay.cancel_all

    def late(self: Delay, task_ids: Any) -> Any:
        for number in replacing:
            results.append(delay.debounce(reindex.s(number), key=key, seconds=LONG))
            break
        return cancel_all(self, task_ids)

    results = [first]
    monkeypatch.setattr(Delay, "cancel_all", late)
    outcome = delay.cancel(key=key, task=TASK, kind="debounce")
    assert outcome.id == results[-1].id
    assert outcome
    assert len(results) == 3
    assert waiting_ids(delay, *(result.id for result in results)) == set()


def test_a_task_that_was_moved_by_days_keeps_its_key(
    key: str, app: Celery, delay: Delay, reindex: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key without a task is forgotten a day after its due time, and here after no time."""
    monkeypatch.setattr("celery_native_delay.app.delay.is_far", lambda due_us, now_us: True)
    calls = {
        "debounce": partial(delay.debounce, seconds=LONG / 2),
        "unique": partial(delay.unique, countdown=LONG / 2),
    }
    for kind, call in calls.items():
        task_id = call(reindex.s(1), key=key).id
        moved = delay.reschedule(task_id, countdown=LONG)
        record = read(app, kind, key).record
        assert record is not None
        assert (record.id, record.due_us) == (task_id, moved.due_us), kind


SHIFTED = """
import sys, time
real, shift_ns = time.time_ns, round(float(sys.argv[1]) * 1e9)
time.time_ns = lambda: real() + shift_ns
time.time = lambda: time.time_ns() / 1e9
import json
from celery import Celery
from celery_native_delay import Delay, install
url, options, settings, task, key = json.loads(sys.argv[2])
app = Celery("shop", broker=url, set_as_current=False)
app.conf.broker_transport_options = options
app.conf.task_default_queue = "jobs"
delay = Delay(install(app, **settings))
for number in 1000, 1001:
    delay.debounce(app.signature(task, args=(number,)), key=key, seconds=2)
app.close()
"""


def test_a_producers_wrong_clock_changes_nothing(key: str, app: Celery, jobs: Counting) -> None:
    """The task is on time by the server's clock, and the replaced task does not run."""
    url, settings = app.conf.broker_url, settings_of(app.conf.broker_url)
    if needs_store(url):
        settings = {"store": app._native_delay.settings().store}
    if "sqlite" in f"{url}{settings}":
        pytest.skip("SQLite has the clock of whoever asks")
    producers = []
    for ahead_seconds in ("-120", "3600"):
        given = [url, options_of(url), SETTINGS | settings, TASK, f"{key}{ahead_seconds}"]
        command = [sys.executable, "-c", SHIFTED, ahead_seconds, json.dumps(given)]
        producers.append(subprocess.Popen(command))
    assert [producer.wait(PATIENCE_SECONDS) for producer in producers] == [0, 0]
    assert [arrival.body[0][0] for arrival in jobs.wait_for(2)] == [1001, 1001]
    for arrival in jobs.arrivals:
        seen = read(app, "debounce", arrival.message.headers[HEADER]["key"])
        assert seen.record is not None
        # A busy machine alone makes no task so late.
        assert -0.1 <= arrival.at - seen.record.due_us / 1e6 < 60


def test_a_debounced_task_keeps_its_key_while_a_worker_lets_it_wait(
    key: str, app: Celery, delay: Delay, reindex: Any, jobs: Counting
) -> None:
    """As a hold does, perhaps for weeks: the next call replaces the task, and starts no second."""
    first = delay.debounce(reindex.s(1), key=key, seconds=0.3)
    assert jobs.receive_until(lambda: jobs.arrivals)
    held_us = round((time() + 90 * 86_400) * 1_000_000)
    with app.connection_for_write() as connection:
        channel, settings = delaying_channel(app, connection)
        wait = Wait(jobs.arrivals[0].message, "jobs", held_us, headers={"held": "by a test"})
        assert channel.worker_part(settings).put_back([wait]) == [None]
    record = read(app, "debounce", key).record
    assert record is not None
    assert record.due_us > held_us - 61 * 86_400 * 1_000_000, "for a month"
    assert delay.debounce(reindex.s(2), key=key, seconds=LONG).replaced == first.id
    assert delay.count(f"key:{key}") == 1


def test_of_concurrent_debounce_calls_one_task_remains(
    key: str, delay: Delay, reindex: Any
) -> None:
    ids: list[str] = []
    for _ in range(5):
        ids += at_once(
            lambda number: str(delay.debounce(reindex.s(number), key=key, seconds=LONG).id)
        )
        assert len(waiting_ids(delay, *ids)) == 1


def test_a_debounced_task_gets_the_arguments_of_all_calls(
    key: str, app: Celery, delay: Delay, jobs: Counting
) -> None:
    """Also of concurrent ones. The last of *collect* calls runs it at once; the next is a first."""

    @app.task(name=f"shop.collecting-{key}", serializer="json", compression="zlib")
    def collecting(number: int, at: Any = None, calls: Any = ()) -> None: ...

    def call(number: int, collect: int = 6) -> KeyedResult:
        signature = collecting.s(number, at=datetime(2026, 1, 1, tzinfo=UTC))
        return delay.debounce(signature, key=key, seconds=LONG, collect=collect)

    first = call(0, 100)
    at_once(call)
    assert delay.count(f"key:{key}") == 1
    assert call(4, 6).replaced not in (None, first.id)
    assert jobs.receive_until(lambda: jobs.arrivals)
    _, kwargs, _ = jobs.arrivals[0].body
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    assert [call[1] for call in kwargs["calls"]] == [{"at": moment}] * 6
    assert [call[0] for call in kwargs["calls"][::5]] == [[0], [4]]
    assert sorted(call[0][0] for call in kwargs["calls"]) == [0, 0, 1, 2, 3, 4]
    assert call(5).replaced is None
    (task,) = delay.ls(f"key:{key}")
    assert task.kwargs.count("{...}") == 1


def test_a_change_of_a_task_that_collects_loses_no_call_and_shows_no_hidden_argument(
    key: str, app: Celery, delay: Delay, jobs: Counting
) -> None:
    @app.task(name=f"shop.hiding-{key}")
    def hiding(mail: str, at: Any = None, calls: Any = ()) -> None: ...

    def call(mail: str) -> KeyedResult:
        signature = hiding.s(mail).set(argsrepr="(…)", kwargsrepr="{…}")
        return delay.debounce(signature, key=key, seconds=LONG, collect=3)

    call("ada")
    assert delay.update(call("bob").id, args=("eve",), kwargs={"at": 1})
    (task,) = delay.ls(f"key:{key}")
    assert (task.args, task.kwargs) == ("(…)", "{…}")
    call("joe")
    assert jobs.receive_until(lambda: jobs.arrivals)
    args, kwargs, _ = jobs.arrivals[0].body
    assert (args, [call[0] for call in kwargs["calls"]]) == (["joe"], [["ada"], ["bob"], ["joe"]])


def test_the_calls_of_a_task_with_a_declared_key_are_collected(
    key: str, app: Celery, delay: Delay, jobs: Counting
) -> None:
    @app.task(name=f"shop.declared-{key}", key=Debounce(key="user", seconds=LONG, collect=3))
    def declared(user: str, page: int = 0, calls: Any = ()) -> None: ...

    declared.delay(key, 1)
    declared.delay(key)
    declared.apply_async(kwargs={"user": key, "page": 2})
    assert jobs.receive_until(lambda: jobs.arrivals)
    calls = [[[key, 1], {}], [[key], {}], [[], {"user": key, "page": 2}]]
    assert jobs.arrivals[0].body[:2] == [[], {"user": key, "page": 2, "calls": calls}]
    with pytest.raises(TypeError, match="without the argument calls"):
        declared.delay(key, calls=[])
    with pytest.raises(ValueError, match="from 2 to 1000, got 1"):
        delay.debounce(declared.s(key), key=key, seconds=LONG, collect=1)
    strict = app.task(name=f"shop.strict-{key}")(imported).s(key)
    with pytest.raises(CannotDelay, match="unexpected keyword argument 'calls'"):
        delay.debounce(strict, key=key, seconds=LONG, collect=2)
    assert delay.count(f"key:{key}") == 0


# ---- throttle -----------------------------------------------------------------------------------


@also_on_sqs
def test_throttle_runs_the_first_call_and_answers_the_others_with_it(
    key: str, delay: Delay, reindex: Any, jobs: Counting
) -> None:
    results = at_once(lambda number: delay.throttle(reindex.s(number), key=key, seconds=LONG))
    ids = [result.id for result in results]
    assert len(set(ids)) == 1
    assert [result.created for result in results].count(True) == 1
    assert jobs.receive_until(lambda: jobs.arrivals)
    later = delay.throttle(reindex.s(9), key=key, seconds=LONG)
    assert (later.id, later.created) == (ids[0], False)
    assert {arrival.message.headers["id"] for arrival in jobs.wait_for(1)} == set(ids)


def test_throttle_on_both_edges_runs_the_first_and_the_last_call(
    key: str, delay: Delay, reindex: Any, jobs: Counting
) -> None:
    results = [
        delay.throttle(reindex.s(number), key=key, seconds=0.8, edge="both") for number in range(5)
    ]
    ids = [result.id for result in results]
    assert all(result.created for result in results)
    assert [result.replaced for result in results] == [None, None, *ids[1:4]]
    assert jobs.receive_until(lambda: len(jobs.args) >= 2)
    assert [arrival.message.headers["id"] for arrival in jobs.arrivals] == [ids[0], ids[-1]]
    assert jobs.args == [0, 4]


# ---- unique -------------------------------------------------------------------------------------


@also_on_sqs
def test_a_unique_task_is_the_answer_while_it_waits_and_in_its_queue(
    key: str, delay: Delay, reindex: Any, jobs: Counting
) -> None:
    def call(number: int, until: Any) -> KeyedResult:
        return delay.unique(reindex.s(number), key=f"{key}-{until}", countdown=LONG, until=until)

    ids: dict[str, str] = {}
    for until in ("start", "end"):
        results = at_once(partial(call, until=until))
        (ids[until],) = {result.id for result in results}
        assert [result.created for result in results].count(True) == 1
        assert waiting_ids(delay, ids[until]) == {ids[until]}
        assert delay.run_now(ids[until])
    marks = {arrival.message.headers["id"]: arrival.message.headers for arrival in jobs.wait_for(2)}
    for until, task_id in ids.items():
        mark = {"v": 1, "kind": "unique", "key": f"{key}-{until}", "until": until}
        assert marks[task_id][HEADER] == mark
        again = call(9, until)
        assert (again.id, again.created) == (task_id, False)
    assert delay.unique(reindex.s(1), key=f"{key}-other", countdown=LONG).id not in ids.values()


def test_a_refused_call_does_not_take_the_key(
    key: str, app: Celery, delay: Delay, reindex: Any
) -> None:
    """Record and message are written in one step."""
    with pytest.raises(DelayTooLong):
        delay.unique(reindex.s(1), key=key, countdown=1e9)
    assert read(app, "unique", key).record is None
    assert delay.show(delay.unique(reindex.s(1), key=key, countdown=LONG).id)


def test_options_of_a_signature_are_kept(key: str, delay: Delay, reindex: Any) -> None:
    signature = reindex.s(1).set(
        queue="invoices", headers={"tenant": "acme"}, expires=3600, task_id="mine", countdown=LONG
    )
    assert delay.unique(signature, key=key).id == "mine"
    (task,) = delay.show("mine")
    assert task.queue == "invoices"
    assert task.due_us / 1e6 >= time() + LONG - 10
    eta = datetime.now(UTC) + timedelta(seconds=LONG)
    other = delay.unique(reindex.s(1), key=f"{key}-other", eta=eta)
    assert abs(delay.show(other)[0].due_us / 1e6 - eta.timestamp()) <= 1


# ---- errors -------------------------------------------------------------------------------------


def test_wrong_arguments_of_keyed_calls_are_refused_with_the_reason(
    key: str, app: Celery, delay: Delay, reindex: Any
) -> None:
    debounce, throttle, unique = (
        partial(call, key=key) for call in (delay.debounce, delay.throttle, delay.unique)
    )
    one, two, cancel = reindex.s(1), reindex.s(2), delay.cancel
    known, other = one.clone().set(task_id="mine"), one.clone().set(countdown=5)
    elsewhere = one.clone().set(connection=Connection("memory://"))
    by_key: dict[str, Any] = {"key": key, "task": TASK, "kind": "unique"}
    two_times: dict[str, Any] = {"countdown": 1, "eta": datetime.now(UTC)}
    shorter = {"seconds": 5, "max_wait_seconds": 1}
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "a single task, got a group", partial(unique, group(one, two))),
        (TypeError, "a single task, got a chain", partial(unique, chain(one, two))),
        (TypeError, "a single task, got a chord", partial(unique, chord([one], two))),
        (TypeError, r"write .*\.s\(\)", partial(unique, reindex)),
        (TypeError, "key to be a text such as", partial(unique, one, key=7)),
        (ValueError, "text that UTF-8 can encode, got 'a", partial(unique, one, key="a\ud800")),
        (ValueError, "until to be 'start' or 'end'", partial(unique, one, until="now")),
        (InvalidDueTime, "longest delay", partial(unique, one, countdown=1e12)),
        (InvalidDueTime, "countdown or eta", partial(unique, one, **two_times)),
        (InvalidDueTime, "at least seconds=5", partial(debounce, one, **shorter)),
        (CannotDelay, "leave out .* connection", partial(debounce, elsewhere, seconds=1)),
        (ValueError, "edge to be 'leading' or", partial(throttle, one, seconds=5, edge="up")),
        (TypeError, "signature without countdown", partial(throttle, other, seconds=5)),
        (TypeError, "without task_id: with", partial(throttle, known, seconds=5, edge="both")),
        (TypeError, "the id of a task, or its AsyncResult", cancel),
        (TypeError, "or all of key, task and kind", partial(cancel, key=key)),
        (TypeError, "or all of key", partial(cancel, **by_key, task_id="1")),
        (TypeError, "key to be a text", partial(cancel, **by_key | {"key": ""})),
        (TypeError, "a task or its name, got 7", partial(cancel, **by_key | {"task": 7})),
        (ValueError, "kind to be 'debounce' or", partial(cancel, **by_key | {"kind": "once"})),
    ]
    for number in (0, -1, float("nan"), float("inf"), 1e12, "5", True):
        with pytest.raises(InvalidDueTime, match="seconds to be a number above 0"):
            debounce(one, seconds=number)
    for error, said, call in refused:
        with pytest.raises(error, match=said):
            call()
    app.conf.task_protocol = 1
    with pytest.raises(CannotDelay, match="task_protocol = 2"):
        Delay(app).debounce(one, key=key, seconds=5)


def test_without_store_a_keyed_call_names_the_setting(app: Celery, key: str) -> None:
    url = app.conf.broker_url
    if not url.startswith("amqp"):
        url = "memory://"
    with install(Celery("shop", broker=url, set_as_current=False), **SETTINGS) as other:
        delay, signature = Delay(other), other.signature(TASK)
        for call in (delay.debounce, delay.throttle, partial(delay.unique, countdown=1)):
            times = {} if isinstance(call, partial) else {"seconds": 1}
            with pytest.raises((NoStore, UnsupportedBroker), match="set native_delay_store"):
                call(signature, key=key, **times)  # type: ignore[arg-type]


def test_eager_tasks_run_at_once(key: str, app: Celery, delay: Delay, reindex: Any) -> None:
    app.conf.task_always_eager = True
    assert delay.debounce(reindex.s(1), key=key, seconds=LONG).get() == (1,)
    assert delay.throttle(reindex.s(2), key=key, seconds=LONG).get() == (2,)
    unique = delay.unique(reindex.s(3), key=key, countdown=LONG)
    assert unique.get() == (3,)
    assert (unique.created, unique.replaced) == (True, None)
