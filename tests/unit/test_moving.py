"""Moving messages between brokers: a message is deleted only after the other broker has it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from celery_native_delay.app.moving import Account, move
from celery_native_delay.due_time import due_us
from celery_native_delay.errors import CannotDelay
from celery_native_delay.keyed.record import HEADER, Mark, Record, Run
from celery_native_delay.keyed.records import KeyRecords
from celery_native_delay.keyed.rules import Rule, Seen, Step
from celery_native_delay.message import Delayed
from celery_native_delay.records.publishing import RecordedPublish
from celery_native_delay.transports.moving import (
    Found,
    Moving,
    Reach,
    Source,
    Stays,
    Void,
    derived_id,
)
from celery_native_delay.transports.virtual.moving import moving_of
from celery_native_delay.transports.virtual.wrapping import encoded, wrapped


def a_message(task_id: str, more: dict[str, Any] | None = None, **options: Any) -> Moving:
    headers = {"task": "shop.remind", "id": task_id} | (more or {})
    properties = {"application_headers": headers}
    return Moving(b"[]", properties, Delayed(task_id, 5, "", "reminders"), **options)


class Place(Source):
    """A source with *messages*; source and destination write to *log*."""

    name = "somewhere"

    def __init__(self, *messages: Found, log: list[str], changing: bool = False) -> None:
        self._messages = messages
        self._log = log
        self._changing = changing
        self._last = ""

    def count(self) -> int:
        return len(self._messages)

    def found(self) -> Iterator[Found]:
        for message in self._messages:
            self._last = getattr(message, "task_id", None) or type(message).__name__
            yield message

    def done(self) -> bool:
        self._log.append(f"{self._last} gone")
        return not self._changing

    def close(self) -> None:
        self._log.append("closed")


class Other:
    """A destination that takes every message but those whose ids are in *refuses*."""

    name = "elsewhere"

    def __init__(self, log: list[str], *refuses: str) -> None:
        self._log = log
        self._refuses = refuses

    def prepare(self, queues: Sequence[Any]) -> None: ...

    def sources(self, what: str | None, reaches: Sequence[Reach]) -> list[Source]:
        return []

    def key_records(self) -> KeyRecords | None:
        return None

    def take_in(self, moving: Moving, keyed: RecordedPublish | None = None) -> bool:
        if moving.task_id in self._refuses:
            raise CannotDelay("it is too far away")
        self._log.append(f"{moving.task_id} in")
        return not moving.again


def moved(place: Place, other: Other, *, stop_after: int = 99) -> Account:
    account = Account(place.name, place.count())
    count = iter(range(1, 99))
    stopped: list[int] = []
    told: list[str | None] = []

    def on_each() -> None:
        if next(count) == stop_after:
            stopped.append(1)

    move(
        place,
        other,
        account,
        pace=None,
        stopped=lambda: bool(stopped),
        on_each=on_each,
        on_doubt=told.append,
    )
    assert told == account.doubtful
    return account


def test_a_message_is_deleted_only_after_it_was_taken_in() -> None:
    log: list[str] = []
    account = moved(Place(a_message("one"), a_message("two"), log=log), Other(log))
    assert log == ["one in", "one gone", "two in", "two gone", "closed"]
    assert (account.moved, account.doubtful) == (2, [])


def test_a_message_that_cannot_be_moved_stays() -> None:
    log: list[str] = []
    place = Place(a_message("far"), Stays("no"), Stays("not late", is_error=False), Void(), log=log)
    account = moved(place, Other(log, "far"))
    assert log == ["Void gone", "closed"]
    assert dict(account.refused) == {"it is too far away": 1, "no": 1}
    assert (account.moved, account.stays) == (0, 1)


def test_stopping_finishes_the_present_message() -> None:
    log: list[str] = []
    place = Place(a_message("one"), a_message("two"), log=log)
    assert moved(place, Other(log), stop_after=1).moved == 1
    assert log == ["one in", "one gone", "closed"]


def test_an_error_of_the_destination_leaves_the_message_in_its_source() -> None:
    log: list[str] = []

    class Broken(Other):
        def take_in(self, moving: Moving, keyed: RecordedPublish | None = None) -> bool:
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        moved(Place(a_message("one"), log=log), Broken(log))
    assert log == ["closed"]


def test_tasks_that_may_run_twice_are_reported() -> None:
    log: list[str] = []
    account = moved(Place(a_message("one", again=True), a_message("two"), log=log), Other(log))
    assert (account.doubtful, account.moved) == (["one"], 2)
    assert moved(Place(a_message("three"), log=log, changing=True), Other(log)).doubtful == [
        "three"
    ]


class Records(KeyRecords):
    """Records in a dict."""

    def __init__(self, **records: Record) -> None:
        self.by_name = records

    def read(self, name: str) -> Seen:
        return Seen(100, self.by_name.get(name))

    def change(self, name: str, rule: Rule, put: Any = None) -> tuple[Seen, Step]:
        seen = self.read(name)
        step = rule(seen)
        self.by_name.pop(name, None)
        if step.record is not None:
            self.by_name[name] = step.record
        return seen, step


MARK = Mark("unique", "shop.remind", "ada", "end")


def moved_with_records(one: Records, other: Records | None) -> tuple[list[str], Account]:
    log: list[str] = []
    place, elsewhere = Place(a_message("one", {HEADER: MARK.header()}), log=log), Other(log)
    place.keeps_keys = False
    place.key_records = lambda: one  # type: ignore[method-assign]
    elsewhere.key_records = lambda: other  # type: ignore[method-assign]
    return log, moved(place, elsewhere)


def test_a_keys_record_is_deleted_before_its_message() -> None:
    records = Records(**{MARK.name: Record(id="one", due_us=5)})
    log, _ = moved_with_records(records, None)
    assert log == ["one in", "one gone", "closed"]
    assert records.by_name == {}


def test_a_task_stays_while_another_attempt_runs_with_its_key() -> None:
    run = Run("zero", "token", lease_us=200)
    records = Records(**{MARK.name: Record(id="one", due_us=5, runs=(run,))})
    log, account = moved_with_records(records, None)
    assert (log, account.moved) == (["closed"], 0)
    assert "a task with its key is running" in next(iter(account.refused))


def test_a_record_that_both_brokers_share_stays() -> None:
    """Two URLs may name one Redis: deleting the record there would delete it here."""
    records = Records(**{MARK.name: Record(id="one", due_us=5)})
    log, _ = moved_with_records(records, records)
    assert log == ["one in", "one gone", "closed"]
    assert records.by_name == {MARK.name: Record(id="one", due_us=5)}


def test_the_account_keeps_a_limited_number_of_reasons_and_ids() -> None:
    account = Account("somewhere", 0)
    for number in range(100):
        account.refuse(f"reason {number}")
    assert len(account.refused) == 21
    assert account.refused.total() == 100


def test_the_derived_delivery_id_of_a_message_is_stable() -> None:
    headers = {"task": "shop.remind", "id": "order-7", "eta": "2026-11-20T10:00:00+00:00"}
    same = derived_id(headers, {}, b"[]", "shop", "orders")
    assert same == derived_id(dict(headers), {}, b"[]", "shop", "orders")
    assert same is not None
    assert bytes.fromhex(same)
    assert len(same) == 32
    others = [
        derived_id(headers, {}, b"[1]", "shop", "orders"),
        derived_id(headers, {}, b"[]", "shop", "parcels"),
        derived_id({**headers, "retries": 1}, {}, b"[]", "shop", "orders"),
        derived_id({**headers, "eta": None}, {}, b"[]", "shop", "orders"),
    ]
    assert len({same, *others}) == 5


def test_a_message_without_a_task_id_has_no_derived_delivery_id() -> None:
    assert derived_id({}, {}, b"tick", "", "clock") is None


@pytest.mark.parametrize("encoding", ["base64", None])
def test_a_kombu_envelope_is_read_back_into_its_message(encoding: str | None) -> None:
    body = "[[], {}, {}]"
    properties = {
        "correlation_id": "order-7",
        "priority": 3,
        "body_encoding": encoding,
        "delivery_tag": "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0",
        "delivery_info": {"exchange": "shop", "routing_key": "orders.new"},
    }
    headers = {"task": "shop.remind", "id": "order-7", "eta": "2026-11-20T10:00:00+00:00"}
    message = {
        "body": b64encode(body.encode()).decode() if encoding else body,
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": headers,
        "properties": properties,
    }
    at_us = due_us(headers["eta"])
    waiting = wrapped(message, due_ms=at_us // 1000)
    found = moving_of(encoded(waiting), queue="orders", due_us=at_us)
    assert found.body == body.encode()
    assert found.headers == headers
    assert found.properties["correlation_id"] == "order-7"
    assert found.properties["content_type"] == "application/json"
    assert "delivery_tag" not in found.properties
    delayed = found.delayed
    assert (delayed.exchange, delayed.routing_key, delayed.queue) == (
        "shop",
        "orders.new",
        "orders",
    )
    assert (delayed.due_us, delayed.cancelled) == (at_us, False)
    again = moving_of(encoded(waiting), queue="orders", due_us=at_us)
    assert again.delayed.delivery_id == delayed.delivery_id
    cancelled = wrapped(message, due_ms=at_us // 1000, cancelled=True)
    found = moving_of(encoded(cancelled), queue="", due_us=at_us)
    assert found.delayed.cancelled
    assert found.delayed.queue is None
    assert "expires" not in found.headers
