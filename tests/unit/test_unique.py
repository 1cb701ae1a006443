"""The keys, locks and claims of a worker's tasks, on the test clock; the leases that it renews.

``acceptance/test_unique`` frees keys in real workers, also of killed ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.exceptions import WorkerLostError
from celery import Celery
from celery.exceptions import Reject, Retry

from celery_native_delay import Delay, Rate, StoreUnavailable, install
from celery_native_delay.app.keyed import key_records
from celery_native_delay.clock import Clock
from celery_native_delay.due_time import due_us
from celery_native_delay.keyed import rules
from celery_native_delay.keyed.record import HEADER, Mark, Record, Run, name_of, name_of_once
from celery_native_delay.keyed.records import KeyRecords
from celery_native_delay.keyed.rules import LEASE_US, Rule, Seen, Step
from celery_native_delay.worker import leases as leases_module
from celery_native_delay.worker import unique as module
from celery_native_delay.worker.arrival import Drop
from celery_native_delay.worker.leases import Leases, leases_of
from tests.waiting import wait_until

MARK = Mark("unique", "sync", "42", "end")
LOCK = name_of("concurrent", "alone", "")


@dataclass
class Shop:
    """An app under the clock, whose tasks do what the test says."""

    app: Celery
    clock: Clock
    does: Callable[[Any], object] = lambda task: None
    ran: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.clock._worker is not None
        self.consumer = self.clock._worker._consumer
        self.began_us = due_us(self.clock.now)

    def record(self, name: str = MARK.name) -> Record | None:
        with self.app.connection_for_write() as connection:
            return key_records(self.app, connection).read(name).record

    def sync(self) -> None:
        """Send a task with the key, whoever has it."""
        self.app.send_task("sync", headers={HEADER: MARK.header()})


@pytest.fixture
def shop() -> Iterator[Shop]:
    app = install(Celery("shop", broker="memory://", set_as_current=False))
    install(app, rates={"alone": Rate(concurrent=1)})

    def run(self: Any) -> None:
        shop.ran.append((due_us(shop.clock.now) - shop.began_us) / 1e6)
        shop.does(self)

    app.task(name="sync", bind=True, acks_late=True)(run)
    app.task(name="alone", bind=True, once=True)(run)
    with Clock(app) as clock:
        shop = Shop(app, clock)
        yield shop


def test_a_second_task_with_the_key_waits_in_the_broker(shop: Shop) -> None:
    """Until the lease of the first one ends."""
    leases_of(shop.app).begin(MARK.name, "0", lambda: True, rules.begin)
    shop.sync()
    shop.clock.advance()
    (task,) = Delay(shop.app).ls()
    assert task.due_us == shop.began_us + LEASE_US
    shop.clock.run_all()
    assert shop.ran == [LEASE_US / 1e6]
    assert shop.record() is None


def test_a_requeued_task_keeps_its_key(shop: Shop) -> None:
    def does(task: Any) -> None:
        if len(shop.ran) == 1:
            raise Reject(requeue=True)

    def note(arrival: Any) -> None:
        seen.append((arrival.id, shop.record()))

    seen: list[Any] = []
    shop.does = does
    shop.consumer.strategies._gates = (note, *shop.consumer.strategies._gates)
    shop.sync()
    shop.clock.advance()
    (task_id, before), (_, between) = seen
    assert (before, between) == (None, Record(id=task_id, due_us=shop.began_us))
    assert (shop.ran, shop.record()) == ([0, 0], None)


def test_a_retry_for_a_killed_process_keeps_the_key(shop: Shop) -> None:
    def does(task: Any) -> None:
        before, request = shop.record(), task.request
        module.retried(task, request, Retry(exc=ValueError("the task's own"), when=30))
        assert shop.record() == before
        module.retried(task, request, Retry(exc=WorkerLostError(), when=30))
        assert shop.record() == Record(id=request.id, due_us=shop.began_us + 30_000_000)

    shop.does = does
    shop.sync()
    shop.clock.advance()
    assert shop.ran == [0]


def test_the_lock_of_a_concurrent_task_that_is_revoked_is_free(shop: Shop) -> None:
    def does(task: Any) -> None:
        record = shop.record(LOCK)
        assert record is not None
        assert len(record.runs) == 1
        module.revoked(task, request=task.request, terminated=True)
        assert shop.record(LOCK) in (None, Record())

    shop.does = does
    shop.app.send_task("alone")
    shop.clock.advance()
    assert shop.ran == [0]


def test_a_task_that_does_not_run_now_frees_its_lock_and_its_claim(shop: Shop) -> None:
    """Else it would wait for its own claim, and its line would stand still for a minute."""
    seen: list[Any] = []
    claim = name_of_once("alone", "1", 0)

    def drops(_: Any) -> Drop:
        seen.extend((shop.record(LOCK), shop.record(claim)))
        return Drop("it lost")

    shop.consumer.strategies._gates += (drops,)
    shop.app.send_task("alone", task_id="1")
    shop.clock.advance()
    assert [each.run is not None or bool(each.runs) for each in seen] == [True, True]
    assert shop.ran == []
    assert [shop.record(LOCK), shop.record(claim)] == [None, None]


def test_cancelling_a_throttled_task_frees_its_key_and_terminating_it_does_not(shop: Shop) -> None:
    name = Mark("throttle", "sync", "42").name

    def does(task: Any) -> None:
        known = shop.record(name)
        assert known is not None
        if len(shop.ran) == 1:
            return
        assert known.id == task.request.id
        module.revoked(task, request=task.request, terminated=True)
        assert shop.record(name) == known
        module.revoked(task, request=task.request)
        assert shop.record(name) is None

    shop.does = does
    for _ in range(2):
        Delay(shop.app).throttle(shop.app.signature("sync"), key="42", seconds=60, edge="both")
        shop.clock.advance()
    shop.clock.run_all()
    assert shop.ran == [0, 60]


def test_messages_that_celery_discards_may_be_no_tasks() -> None:
    module.discarded(None, SimpleNamespace(headers="not a task's"))


def test_a_task_waits_while_its_record_is_unreachable_with_one_warning(
    shop: Shop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> Any:
        raise StoreUnavailable("it does not answer")

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(KeyRecords, "change", away)
        for _ in range(2):
            shop.sync()
        shop.clock.advance(seconds=1)
    (told,) = (line for line in caplog.messages if "keys cannot be read" in line)
    assert "unique tasks wait" in told
    shop.clock.run_all()
    assert shop.ran == [5, 5]


# ---- leases --------------------------------------------------------------------------------------


class Records(KeyRecords):
    """One record, in a place that may be unreachable."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self.is_away = False

    def change(self, name: str, rule: Rule, put: Any = None) -> tuple[Seen, Step]:
        if self.is_away:
            raise StoreUnavailable("it does not answer")
        seen = Seen(LEASE_US, self.record)
        step = rule(seen)
        self.record = step.record
        return seen, step


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> tuple[Leases, Records]:
    leases, records = Leases(None), Records()
    monkeypatch.setattr(leases, "_connected", lambda: (records, True))
    monkeypatch.setattr(leases_module, "RETRY_SECONDS", 0.01)
    return leases, records


def test_a_key_that_cannot_be_freed_is_freed_later(kept: tuple[Leases, Records]) -> None:
    leases, records = kept
    token, _ = leases.begin(MARK.name, "1", lambda: True, rules.begin)
    records.is_away = True
    leases.settle(MARK.name, partial(rules.end, token=token), token=token)
    assert records.record is not None
    records.is_away = False
    wait_until(lambda: records.record is None)


def test_a_renewal_that_failed_is_tried_again_soon(
    monkeypatch: pytest.MonkeyPatch, kept: tuple[Leases, Records], caplog: pytest.LogCaptureFixture
) -> None:
    """A lease of a minute must survive a short outage of Redis. It ends with its task."""
    leases, records = kept
    monkeypatch.setattr(leases_module, "RENEWED_EVERY_SECONDS", 0.01)
    here = [True]
    token, _ = leases.begin(MARK.name, "1", lambda: here[0], rules.begin)
    old = Record(runs=(Run("1", token, 0),))
    records.is_away = True
    wait_until(lambda: "cannot renew the lease" in caplog.text)
    monkeypatch.setattr(leases_module, "RENEWED_EVERY_SECONDS", 3600)
    told = len(caplog.records)
    wait_until(lambda: len(caplog.records) >= told + 3)
    records.record = old
    monkeypatch.setattr(leases_module, "RENEWED_EVERY_SECONDS", 0.01)
    records.is_away = False
    wait_until(lambda: records.record != old)
    here[0] = False
    wait_until(lambda: not leases._held)
