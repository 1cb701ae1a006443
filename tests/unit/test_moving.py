"""Moving messages between brokers: a message is deleted only after the other broker has it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from types import SimpleNamespace
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
    Source,
    Stays,
    Void,
    derived_id,
)
from celery_native_delay.transports.rabbitmq.moving import deliveries_of
from celery_native_delay.transports.virtual.moving import moving_of
from celery_native_delay.transports.virtual.wrapping import encoded, wrapped

MARK = Mark("unique", "shop.remind", "ada", "end")


def a_message(task_id: str, **headers: Any) -> Moving:
    properties = {"application_headers": {"task": "shop.remind", "id": task_id, **headers}}
    return Moving(b"[]", properties, Delayed(task_id, 5, "", "reminders"))


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


class Place(Source):
    """A source of messages, which writes to a log what happens to them."""

    name = "somewhere"
    keeps_keys = False

    def __init__(self, messages: tuple[Found, ...], records: Records | None, log: list[str]):
        self._messages = messages
        self._records = records
        self._log = log

    def count(self) -> int:
        return len(self._messages)

    def key_records(self) -> KeyRecords | None:
        return self._records

    def found(self) -> Iterator[Found]:
        for message in self._messages:
            self._last = getattr(message, "task_id", None) or type(message).__name__
            yield message

    def done(self) -> bool:
        self._log.append(f"{self._last} gone")
        return True

    def close(self) -> None:
        self._log.append("closed")


def moved(
    *messages: Found,
    log: list[str],
    error: Exception | None = None,
    records: Records | None = None,
    shared: bool = False,
) -> Account:
    """Move messages; the destination raises *error* or takes them, and may share the records."""

    def take_in(moving: Moving, keyed: RecordedPublish | None = None) -> bool:
        if error is not None:
            raise error
        log.append(f"{moving.task_id} in")
        return True

    there = SimpleNamespace(take_in=take_in, key_records=lambda: records if shared else None)
    account = Account("somewhere", len(messages))
    move(
        Place(messages, records, log),
        there,  # type: ignore[arg-type]
        account,
        pace=None,
        stopped=lambda: False,
        on_each=lambda: None,
        on_doubt=lambda _: None,
    )
    return account


def test_a_message_is_deleted_only_after_it_was_taken_in() -> None:
    log: list[str] = []
    account = moved(a_message("one"), a_message("two"), log=log)
    assert log == ["one in", "one gone", "two in", "two gone", "closed"]
    assert (account.moved, account.doubtful) == (2, [])


def test_a_message_that_cannot_be_moved_stays() -> None:
    log: list[str] = []
    messages = (a_message("far"), Stays("no"), Stays("not late", is_error=False), Void())
    account = moved(*messages, log=log, error=CannotDelay("it is too far away"))
    assert log == ["Void gone", "closed"]
    assert dict(account.refused) == {"it is too far away": 1, "no": 1}
    assert (account.moved, account.stays) == (0, 1)
    with pytest.raises(OSError, match="gone"):
        moved(a_message("one"), log=log, error=OSError("gone"))
    assert log == ["Void gone", "closed", "closed"]


def test_a_task_stays_while_another_attempt_runs_with_its_key() -> None:
    log: list[str] = []
    run = Run("zero", "token", lease_us=200)
    records = Records(**{MARK.name: Record(id="one", due_us=5, runs=(run,))})
    account = moved(a_message("one", **{HEADER: MARK.header()}), log=log, records=records)
    assert (log, account.moved) == (["closed"], 0)
    assert "a task with its key is running" in next(iter(account.refused))


@pytest.mark.parametrize("shared", [True, False])
def test_a_record_moves_with_its_task_unless_both_brokers_share_it(shared: bool) -> None:
    """Two URLs may name one Redis: deleting the record there would delete it here."""
    log: list[str] = []
    record = Record(id="one", due_us=5)
    records = Records(**{MARK.name: record})
    message = a_message("one", **{HEADER: MARK.header()})
    moved(message, log=log, records=records, shared=shared)
    assert log == ["one in", "one gone", "closed"]
    assert records.by_name == ({MARK.name: record} if shared else {})


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
    assert derived_id({}, {}, b"tick", "", "clock") is None, "it has no task id"


@pytest.mark.parametrize("encoding", ["base64", None])
def test_a_kombu_envelope_is_read_back_into_its_message(encoding: str | None) -> None:
    body = "[[], {}, {}]"
    properties = {
        "correlation_id": "order-7",
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
    assert (found.body, found.headers) == (body.encode(), headers)
    assert found.properties["correlation_id"] == "order-7"
    assert found.properties["content_type"] == "application/json"
    assert "delivery_tag" not in found.properties
    delivery_id = found.delayed.delivery_id
    assert found.delayed == Delayed(delivery_id, at_us, "shop", "orders.new", "orders")
    again = moving_of(encoded(waiting), queue="orders", due_us=at_us)
    assert again.delayed.delivery_id == delivery_id
    cancelled = wrapped(message, due_ms=at_us // 1000, cancelled=True)
    found = moving_of(encoded(cancelled), queue="", due_us=at_us)
    assert (found.delayed.cancelled, found.delayed.queue) == (True, None)
    assert "expires" not in found.headers


def test_deliveries_are_read_from_the_headers_of_every_rabbitmq() -> None:
    assert deliveries_of({}) == 0
    assert deliveries_of({"application_headers": {"x-delivery-count": 3}}) == 3
    assert deliveries_of({"application_headers": {"x-acquired-count": 7}}) == 7
