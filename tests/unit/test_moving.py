"""Moving messages between brokers: their keys, their ids, and how they are read."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery

from celery_native_delay import install
from celery_native_delay.app.keyed import key_records
from celery_native_delay.app.moving import Account, MovingKeys
from celery_native_delay.due_time import due_us
from celery_native_delay.errors import CannotDelay
from celery_native_delay.keyed.record import HEADER, Mark, Record, Run
from celery_native_delay.keyed.records import KeyRecords
from celery_native_delay.keyed.rules import Step
from celery_native_delay.message import Delayed
from celery_native_delay.transports.moving import Moving, derived_id
from celery_native_delay.transports.rabbitmq.moving import deliveries_of
from celery_native_delay.transports.virtual.moving import moving_of
from celery_native_delay.transports.virtual.wrapping import encoded, wrapped

FAR_US = 1 << 60
MARK = Mark("unique", "shop.remind", "ada", "end")


@pytest.fixture
def records(tmp_path: Path) -> Iterator[KeyRecords]:
    app = Celery("shop", broker="memory://", set_as_current=False)
    install(app, store=f"sqlite:///{tmp_path}/delays.db")
    with app, app.connection_for_write() as connection:
        yield key_records(app, connection)


def taken_in(records: KeyRecords, record: Record, *, shared: bool = False) -> bool:
    """Move the task "one", whose key has this record, to a place that may share the records."""
    records.change(MARK.name, lambda seen: Step(record, FAR_US))
    source: Any = Mock(keeps_keys=False, key_records=lambda: records)
    there: Any = Mock(key_records=lambda: records if shared else None)
    headers = {"task": "shop.remind", "id": "one", HEADER: MARK.header()}
    properties = {"application_headers": headers}
    moving = Moving(b"[]", properties, Delayed("one", 5, "", "reminders"))
    MovingKeys(source, there).take_in(moving)
    return bool(there.take_in.called)


def test_a_task_stays_while_another_attempt_runs_with_its_key(records: KeyRecords) -> None:
    run = Run("zero", "token", lease_us=FAR_US)
    with pytest.raises(CannotDelay, match="a task with its key is running"):
        taken_in(records, Record(id="one", due_us=5, runs=(run,)))


@pytest.mark.parametrize("shared", [True, False])
def test_a_record_moves_with_its_task_unless_shared(records: KeyRecords, shared: bool) -> None:
    """Two URLs may name one Redis: deleting the record there would delete it here."""
    record = Record(id="one", due_us=5)
    assert taken_in(records, record, shared=shared)
    assert records.read(MARK.name).record == (record if shared else None)


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
