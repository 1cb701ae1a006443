"""The header by which a consumer on a virtual transport knows that a message waited."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from celery_native_delay.due_time import milliseconds_up
from celery_native_delay.message import HEADER, Delayed
from celery_native_delay.transports.virtual.wrapping import unwrapped, wrapped

ETA = "2026-11-20T12:00:00.000001+00:00"
DUE_MS = 1_795_176_000_001


def message(**headers: Any) -> dict[str, Any]:
    info = {"exchange": "shop", "routing_key": "orders.new"}
    return {
        "body": "…",
        "headers": headers,
        "properties": {"delivery_tag": "tag-1", "delivery_info": info},
    }


def test_a_wrapped_message_is_unwrapped_without_our_header() -> None:
    original = message(task="t", eta=ETA, customer=7)
    before = copy.deepcopy(original)
    went_in = wrapped(original, due_ms=DUE_MS)
    assert original == before, "the caller's message goes to other queues, too"
    assert went_in == before | {"headers": before["headers"] | {HEADER: {"v": 1, "due": DUE_MS}}}
    headers, delayed = unwrapped(went_in["headers"], went_in["properties"])
    assert headers == before["headers"]
    assert delayed == Delayed("tag-1", DUE_MS * 1000, "shop", "orders.new")


@pytest.mark.parametrize(
    "headers",
    [
        {"eta": ETA},
        {"eta": ETA, HEADER: "nonsense"},
        {"eta": ETA, HEADER: {"v": 99, "due": DUE_MS}},
        {"eta": ETA, HEADER: {"v": 1}},
        {"eta": ETA, HEADER: {"v": 1, "due": DUE_MS - 1}},  # taken along by a plain worker's retry
        {"eta": None, HEADER: {"v": 1, "due": DUE_MS}},
        {"eta": "soon", "task": "t", HEADER: {"v": 1, "due": DUE_MS}},
    ],
)
def test_our_header_is_ignored_if_it_does_not_match_the_eta(headers: dict[str, Any]) -> None:
    opened, delayed = unwrapped(headers, message()["properties"])
    assert delayed is None
    assert HEADER not in opened


def test_milliseconds_are_rounded_up() -> None:
    assert [milliseconds_up(us) for us in (-1, 0, 1, 999, 1000, 1001)] == [0, 0, 1, 1, 1, 2]


def test_a_message_may_wait_beyond_its_eta_with_a_given_delivery_id() -> None:
    """A rate-limited task, for example. It has another delivery tag when it comes back."""
    for eta in (ETA, None):
        went_in = wrapped(message(task="t", eta=eta), due_ms=DUE_MS + 5000, delivery_id="own")
        _, delayed = unwrapped(went_in["headers"], went_in["properties"])
        assert delayed == Delayed("own", (DUE_MS + 5000) * 1000, "shop", "orders.new")
        retried = {**went_in["headers"], "eta": "2026-11-20T13:00:00+00:00"}
        assert unwrapped(retried, went_in["properties"])[1] is None
