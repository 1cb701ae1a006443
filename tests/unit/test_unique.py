"""The worker's gate for unique tasks, and the leases that a worker renews."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from billiard.exceptions import WorkerLostError
from celery import Celery, signals, states
from celery.exceptions import Reject, Retry
from celery.worker import state as worker_state

from celery_native_delay import Rate, StoreUnavailable, install
from celery_native_delay.keyed.record import HEADER, LOCKS, Mark, Record, Run
from celery_native_delay.keyed.records import KeyRecords
from celery_native_delay.keyed.rules import LEASE_US, Rule, Seen, Step
from celery_native_delay.message import ONCE
from celery_native_delay.rates.line import Asked
from celery_native_delay.worker import leases as leases_module
from celery_native_delay.worker import once
from celery_native_delay.worker import unique as module
from celery_native_delay.worker.arrival import Arrival, AskAgain, Drop, WaitUntil
from celery_native_delay.worker.leases import Leases
from celery_native_delay.worker.strategies import GatedStrategies
from celery_native_delay.worker.unique import PAUSE_SECONDS, Unique, give_back, take_locks
from tests.waiting import wait_until

NOW_US = 1_795_176_000_000_000
KEY = "unique:shop.sync:42"


class Records(KeyRecords):
    """One record, in a place that may be unreachable."""

    def __init__(self) -> None:
        self.name = KEY
        self.record: Record | None = Record(id="1", due_us=NOW_US)
        self.is_away = False

    def read(self, name: str) -> Seen:
        assert name == self.name
        if self.is_away:
            raise StoreUnavailable("it does not answer")
        return Seen(NOW_US, self.record)

    def change(self, name: str, rule: Rule, put: Any = None) -> tuple[Seen, Step]:
        seen = self.read(name)
        step = rule(seen)
        self.record = step.record
        return seen, step


@pytest.fixture
def app() -> Iterator[Celery]:
    with install(Celery("shop", broker="memory://", set_as_current=False)) as app:
        app.task(name="shop.sync")(sync)
        yield app


def sync() -> None: ...


@pytest.fixture
def records(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Records:
    records = Records()
    found = Leases(app)
    monkeypatch.setattr(found, "_connected", lambda: (records, True))
    monkeypatch.setattr(module, "leases_of", lambda app: found)
    monkeypatch.setattr(leases_module, "RETRY_SECONDS", 0.01)
    return records


@pytest.fixture
def gate(app: Celery) -> Unique:
    return Unique(app)


def arrival(until: str = "end", **headers: Any) -> Arrival:
    mark = Mark("unique", "shop.sync", "42", until).header()
    message = SimpleNamespace(
        headers={"id": "1", "task": "shop.sync", HEADER: mark, **headers},
        acknowledged=False,
        channel=SimpleNamespace(connection=object()),
    )
    return Arrival(message, message.headers, None, NOW_US)


def context(app: Celery, headers: dict[str, Any]) -> Any:
    """The task with a request that has *headers*, as in the process that runs it."""
    task = app.tasks["shop.sync"]
    task.push_request(**headers)
    return task


def test_a_task_without_a_mark_passes(gate: Unique) -> None:
    assert gate(arrival(**{HEADER: None})) is None
    assert gate(arrival(**{HEADER: {"v": 2}})) is None
    assert gate(arrival(**{HEADER: Mark("debounce", "shop.sync", "42").header()})) is None


def test_a_task_takes_its_key_and_frees_it_at_its_end(
    app: Celery, gate: Unique, records: Records
) -> None:
    comes = arrival()
    assert gate(comes) is None
    token = comes.message.headers[HEADER]["token"]
    assert records.record == Record(runs=(Run("1", token, NOW_US + LEASE_US),))
    task = context(app, comes.message.headers)
    module.start(task)
    module.end(task, state=states.SUCCESS)
    assert records.record is None


def test_a_second_task_with_the_key_waits_in_the_broker(gate: Unique, records: Records) -> None:
    records.record = Record(runs=(Run("0", "another", NOW_US + 5),))
    assert gate(arrival()) == WaitUntil(NOW_US + 5, otherwise=AskAgain(PAUSE_SECONDS))


@pytest.mark.parametrize(
    ("state", "retval", "due_us"),
    [
        (states.RETRY, Retry(when=30), NOW_US + 30_000_000),
        (states.REJECTED, Reject(requeue=True), NOW_US),
    ],
)
def test_a_retried_or_requeued_task_keeps_its_key(
    app: Celery, gate: Unique, records: Records, state: str, retval: Any, due_us: int
) -> None:
    comes = arrival()
    gate(comes)
    task = context(app, comes.message.headers)
    module.start(task)
    module.end(task, state=state, retval=retval)
    assert records.record == Record(id="1", due_us=due_us)


def test_until_start_the_key_is_free_when_the_task_starts(
    app: Celery, gate: Unique, records: Records
) -> None:
    comes = arrival("start")
    assert gate(comes) is None
    token = comes.message.headers[HEADER]["token"]
    assert records.record == Record(runs=(Run("1", token, NOW_US + LEASE_US),))
    task = context(app, comes.message.headers)
    module.start(task)
    assert records.record is None
    module.end(task, state=states.RETRY, retval=Retry(when=30))
    assert records.record is None


def limited(number: str) -> tuple[Arrival, int | None]:
    """A task with a limit of one concurrent task, and the time at which it tries again."""
    comes = arrival()
    comes.message.headers = {"id": number, "task": "shop.sync"}
    comes.consumer = SimpleNamespace(app=comes)
    rate = Rate(key="tenant", concurrent=1)
    return comes, take_locks(comes, [Asked("shop.sync", "42", rate), Asked("x", "42", Rate("1/s"))])


@pytest.mark.parametrize("how", ["ends", "is revoked", "is lost", "does not start"])
def test_a_second_concurrent_task_waits_until_the_first_one_has_left(
    app: Celery, records: Records, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(records, "name", "concurrent:shop.sync:42")
    records.record = None
    (first, free_us), (second, again_us) = limited("1"), limited("2")
    assert free_us is None
    assert again_us is not None
    assert again_us > NOW_US
    assert LOCKS not in second.message.headers
    task = context(app, dict(first.message.headers))
    if how == "does not start":
        give_back(task, first.message.headers)
    elif how == "is revoked":
        module.revoked(task, request=task.request, terminated=True)
    else:
        module.start(task)
        if how == "is lost":
            module.lost(task, "1", WorkerLostError())
        else:
            module.end(task, state=states.RETRY, retval=Retry(when=30))
    assert records.record is not None
    assert records.record.runs == ()
    assert limited("2")[1] is None


@pytest.mark.parametrize(
    "header", [None, 5, "x", [5], ["abc"], [["a", 5]], [["a", "\ud800"]], {"abc": "b"}]
)
def test_malformed_locks_of_a_message_are_ignored(header: Any) -> None:
    """The sender has no app, so that an attempt to free such a lock would fail."""
    headers = {LOCKS: header}
    give_back(None, headers)
    assert headers == {}


def test_a_revoked_task_is_left_to_celery_and_frees_its_key(
    app: Celery, gate: Unique, records: Records
) -> None:
    worker_state.revoked.add("1")
    try:
        comes = arrival()
        assert gate(comes) is None
        assert "token" not in comes.message.headers[HEADER]
    finally:
        worker_state.revoked.discard("1")
    task = context(app, comes.message.headers)
    module.revoked(task, request=task.request)
    assert records.record is None


def test_cancelling_a_throttled_task_frees_its_key_and_terminating_it_does_not(
    app: Celery, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "name", "throttle:shop.sync:42")
    known = Record(id="1", due_us=NOW_US, window_us=NOW_US + 5, opener="0")
    records.record = known
    task = context(app, arrival(**{HEADER: Mark("throttle", "shop.sync", "42").header()}).fields)
    module.revoked(task, request=task.request, terminated=True)
    assert records.record == known
    module.revoked(task, request=task.request)
    assert records.record == Record(window_us=NOW_US + 5, opener="0")


@pytest.mark.parametrize("signal", [signals.task_unknown, signals.task_rejected])
def test_a_task_that_celery_discards_frees_its_key(
    app: Celery, gate: Unique, records: Records, signal: Any
) -> None:
    """A task of an unknown name does not reach the gate; an invalid task has passed it."""
    comes = arrival()
    if signal is signals.task_rejected:
        gate(comes)
    consumer = Mock(app=app)
    signal.send(sender=consumer, message=SimpleNamespace(headers="not a task's"))
    signal.send(sender=consumer, message=SimpleNamespace(headers={"id": "1"}))
    assert records.record is not None
    signal.send(sender=consumer, message=comes.message)
    assert records.record is None


def test_a_message_that_expired_in_the_broker_frees_its_key(
    app: Celery, gate: Unique, records: Records
) -> None:
    consumer = SimpleNamespace(app=app, connection_errors=(), event_dispatcher=None, hub="a hub")
    tallying = SimpleNamespace(expired=lambda message: None)

    def drops(arrival: Arrival) -> Drop:
        return Drop("it has expired", expired=True)

    strategies = GatedStrategies(consumer, (drops,), Mock(), tallying)  # type: ignore[arg-type]
    strategies["shop.sync"] = Mock()
    strategies["shop.sync"](arrival().message, None, Mock(), Mock(), [])
    assert records.record is None


@pytest.mark.parametrize(
    ("requeue", "left"), [(True, Record(id="1", due_us=NOW_US)), (False, None)]
)
def test_a_task_whose_message_celery_rejects_frees_its_key_first(
    app: Celery, gate: Unique, records: Records, requeue: bool, left: Record | None
) -> None:
    """Celery gives no other sign of a killed process whose task is to be delivered again."""
    reject = Mock(side_effect=lambda *args: rejected.append((args, records.record)))
    rejected: list[Any] = []
    strategies = GatedStrategies(SimpleNamespace(app=app), (gate,), Mock(), Mock())
    strategies["shop.sync"] = strategy = Mock()
    strategies["shop.sync"](arrival().message, None, Mock(), reject, [])
    assert records.record is not None
    assert records.record.run is not None
    on_reject = strategy.call_args.args[3]
    on_reject("logger", (OSError,), requeue)
    assert rejected == [(("logger", (OSError,), requeue), left)]


def test_a_concurrent_task_whose_message_celery_requeues_frees_its_lock(
    app: Celery, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "name", "concurrent:shop.sync:42")
    records.record = None
    comes, _ = limited("1")
    strategies = GatedStrategies(SimpleNamespace(app=app), (), Mock(), Mock())
    strategies["shop.sync"] = strategy = Mock()
    strategies["shop.sync"](comes.message, None, Mock(), Mock(), [])
    on_reject = strategy.call_args.args[3]
    assert limited("2")[1] is not None
    on_reject("logger", (OSError,), True)
    assert limited("2")[1] is None


def test_a_retry_for_a_killed_process_keeps_the_key(
    app: Celery, gate: Unique, records: Records
) -> None:
    comes = arrival()
    gate(comes)
    before, task = records.record, context(app, comes.message.headers)
    reason = Retry(exc=ValueError("the task's own"), when=30)
    signals.task_retry.send(sender=task, request=task.request, reason=reason, einfo=None)
    assert records.record == before
    reason = Retry(exc=WorkerLostError(), when=30)
    signals.task_retry.send(sender=task, request=task.request, reason=reason, einfo=None)
    assert records.record == Record(id="1", due_us=NOW_US + 30_000_000)


def test_a_task_waits_while_its_record_is_unreachable_with_one_warning(
    gate: Unique, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    records.is_away = True
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert gate(arrival()) == arrival().until_store_answers()
    (told,) = caplog.records
    assert told.getMessage() == (
        "native delay: unique tasks wait: the store of their keys cannot be read: "
        "StoreUnavailable: it does not answer"
    )


def test_a_key_that_cannot_be_freed_is_freed_later(
    app: Celery, gate: Unique, records: Records
) -> None:
    comes = arrival()
    gate(comes)
    task = context(app, comes.message.headers)
    records.is_away = True
    module.end(task, state=states.SUCCESS)
    assert records.record is not None
    records.is_away = False
    wait_until(lambda: records.record is None)


def test_a_lease_is_renewed_while_the_worker_has_its_task(
    monkeypatch: pytest.MonkeyPatch, gate: Unique, records: Records
) -> None:
    monkeypatch.setattr(leases_module, "RENEWED_EVERY_SECONDS", 0.01)
    comes = arrival()
    gate(comes)
    assert records.record is not None
    assert records.record.run is not None
    old = Run("1", records.record.run.token, 0)
    records.record = Record(runs=(old,))
    wait_until(lambda: records.record != Record(runs=(old,)))
    comes.message.acknowledged = True
    wait_until(lambda: not module.leases_of(None)._held)


def test_a_renewal_that_failed_is_tried_again_soon(
    monkeypatch: pytest.MonkeyPatch,
    gate: Unique,
    records: Records,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A lease of a minute must survive a short outage of Redis."""
    monkeypatch.setattr(leases_module, "RENEWED_EVERY_SECONDS", 0.01)
    gate(arrival())
    assert records.record is not None
    assert records.record.run is not None
    old = Record(runs=(Run("1", records.record.run.token, 0),))
    records.is_away = True
    wait_until(lambda: "cannot renew the lease" in caplog.text)
    monkeypatch.setattr(leases_module, "RENEWED_EVERY_SECONDS", 3600)
    told = len(caplog.records)
    wait_until(lambda: len(caplog.records) >= told + 3)
    records.record = old
    records.is_away = False
    wait_until(lambda: records.record != old)


def test_a_task_that_does_not_run_now_frees_its_locks_and_its_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would wait for its own claim, and its line would stand still for a minute."""
    freed: list[str] = []

    def settle_in_time(name: str, rule: Any, *, token: str) -> None:
        freed.append(token)

    leases = SimpleNamespace(settle_in_time=settle_in_time)
    for found in (module, once):
        monkeypatch.setattr(found, "leases_of", lambda app: leases)
    waits = arrival(**{LOCKS: [["concurrent", "of a lock"]], ONCE: "of the claim"})
    waits = replace(waits, consumer=SimpleNamespace(app=None))
    once.free_taken(waits)
    assert freed == ["of a lock", "of the claim"]
    assert (LOCKS in waits.message.headers, waits.message.headers[ONCE]) == (False, True)
