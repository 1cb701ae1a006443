"""Moving messages between brokers: a message is deleted only after the other broker has it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from celery_native_delay.app.moving import Account, move
from celery_native_delay.due_time import due_us
from celery_native_delay.errors import CannotDelay
from celery_native_delay.keyed.record import HEADER, Mark
from celery_native_delay.message import Delayed
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


def a_message(task_id: str, **headers: Any) -> Moving:
    properties = {"application_headers": {"task": "shop.remind", "id": task_id, **headers}}
    return Moving(b"[]", properties, Delayed(task_id, 5, "", "reminders"))


class Place(Source):
    """A source of messages, which writes to a log what happens to them."""

    name = "somewhere"
    keeps_keys = False

    def __init__(self, messages: tuple[Found, ...], log: list[str]):
        self._messages = messages
        self._log = log

    def count(self) -> int:
        return len(self._messages)

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
) -> Account:
    """Move messages; the destination raises *error* or takes them."""

    def take_in(moving: Moving) -> bool:
        if error is not None:
            raise error
        log.append(f"{moving.task_id} in")
        return True

    there = SimpleNamespace(take_in=take_in)
    account = Account("somewhere", len(messages))
    move(
        Place(messages, log),
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


def test_a_task_with_a_key_stays_unless_it_is_cancelled() -> None:
    """The state of its key is at the source."""
    log: list[str] = []
    keyed = a_message("one", **{HEADER: Mark("unique", "shop.remind", "ada", "end").header()})
    account = moved(keyed, log=log)
    assert (log, account.moved, account.refused.total()) == (["closed"], 0, 1)
    log.clear()
    moved(replace(keyed, delayed=keyed.delayed._replace(cancelled=True)), log=log)
    assert log == ["one in", "one gone", "closed"]


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
