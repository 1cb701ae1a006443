"""What is stored of a message comes out again, and what a consumer sees of its wait."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay.core.delayed import HEADER, Delayed
from celery_native_delay.core.due_time import milliseconds_up
from celery_native_delay.transports.redis.envelope import (
    Destination,
    entry_of,
    opened_entry,
    sealed,
    unsealed,
)

ETA = "2026-11-20T12:00:00.000001+00:00"
DUE_MS = 1_795_176_000_001

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(
    st.builds(
        Destination,
        st.lists(names, min_size=1, max_size=5).map(tuple),
        st.integers(0, 10**10),
        st.booleans(),
    ),
    names,
)
def test_an_entry_opens_to_what_it_was_made_of(destination: Destination, envelope: str) -> None:
    opened = opened_entry(entry_of(destination, envelope))
    assert opened == (destination, envelope.encode())


def test_the_entry_of_version_1_is_frozen() -> None:
    """Redis holds them in production, and Lua reads them."""
    assert entry_of(Destination(("jobs",)), '{"a": 1}') == b'push 0 4\njobs{"a": 1}'
    expiring = Destination(("jobs\x06\x163", "jöbs"), ttl_ms=500)
    assert entry_of(expiring, "{}") == b"push 500 7 5\njobs\x06\x163j\xc3\xb6bs{}"
    broadcast = Destination(("/0.news",), broadcast=True)
    assert entry_of(broadcast, "{}") == b"publish 0 7\n/0.news{}"


def message(**headers: Any) -> dict[str, Any]:
    info = {"exchange": "shop", "routing_key": "orders.new"}
    return {
        "body": "…",
        "headers": headers,
        "properties": {"delivery_tag": "tag-1", "delivery_info": info},
    }


def test_a_sealed_message_tells_of_its_wait_and_opens_without_a_trace() -> None:
    original = message(task="t", eta=ETA, customer=7)
    before = copy.deepcopy(original)
    went_in = sealed(original, due_ms=DUE_MS)
    assert original == before, "the caller's message goes to other queues, too"
    assert went_in == before | {"headers": before["headers"] | {HEADER: {"v": 1, "due": DUE_MS}}}
    headers, delayed = unsealed(went_in["headers"], went_in["properties"])
    assert headers == before["headers"]
    assert delayed == Delayed("tag-1", DUE_MS, "shop", "orders.new")


def test_a_message_of_protocol_1_has_no_eta_header() -> None:
    went_in = sealed(message(), due_ms=DUE_MS)
    assert unsealed(went_in["headers"], went_in["properties"])[1] is not None


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
def test_whatever_else_carries_a_trace_did_not_wait(headers: dict[str, Any]) -> None:
    opened, delayed = unsealed(headers, message()["properties"])
    assert delayed is None
    assert HEADER not in opened


@pytest.mark.parametrize(("us", "ms"), [(0, 0), (1, 1), (999, 1), (1000, 1), (1001, 2), (-1, 0)])
def test_milliseconds_are_rounded_up(us: int, ms: int) -> None:
    assert milliseconds_up(us) == ms
