"""A received frame loses the dead-letter headers of delay queues, and nothing else."""

from __future__ import annotations

from datetime import datetime
from struct import pack
from typing import Any

import pytest
from amqp.basic_message import Message
from amqp.serialization import decode_properties_basic
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay.message import HEADER, Delayed
from celery_native_delay.transports.rabbitmq.deaths import without_our_deaths
from celery_native_delay.transports.rabbitmq.wrapping import DEATH_HEADERS, unwrap

LEVELS = [f"celery_delay.v1.31x125ms.f15.quorum.level-{number:02}" for number in (3, 7, 30)]
FAKE = f"\x05queueS\x00\x00\x00\x2f{LEVELS[0]}"
"""A text of a user that looks like an entry of a table."""

texts = st.sampled_from(["", "celery", "é" * 100, "\x07x-deathA\x00\x00\x00\x00", FAKE])
times = st.just(datetime(2026, 11, 20, 12))
values = st.recursive(
    texts | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(0, 1) | times | st.none(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
deaths = st.fixed_dictionaries(
    {"queue": st.sampled_from([*LEVELS, *LEVELS, "celery", FAKE])},
    optional={"count": st.just(1), "time": times, "routing-keys": st.lists(texts, max_size=2)},
)


@st.composite
def messages(draw: Any) -> dict[str, Any]:
    """Headers of a delayed message, as RabbitMQ delivers them."""
    header = Delayed("id-1", 1_795_176_000_000_000, "jobs", "a.b").header({})
    headers = draw(st.dictionaries(st.sampled_from(["task", "id", "eta", "zeta"]), values))
    if draw(st.booleans()):
        headers["x-death"] = draw(st.lists(deaths, max_size=3))
    for order in draw(st.lists(st.sampled_from(["first", "last"]), unique=True)):
        headers[f"x-{order}-death-queue"] = draw(st.sampled_from([*LEVELS, "celery"]))
        headers[f"x-{order}-death-reason"] = "expired"
    return headers | {HEADER: header}


def frame_of(headers: dict[str, Any], **properties: Any) -> bytes:
    message = Message(b"body", application_headers=headers, **properties)
    return pack(">HHQ", 60, 0, 4) + message._serialize_properties()


def read(frame: bytes) -> dict[str, Any]:
    properties: dict[str, Any]
    properties, end = decode_properties_basic(frame, 12)
    assert end == len(frame)
    return properties


@given(messages(), st.booleans())
def test_a_message_is_opened_alike_with_and_without_the_frame_cut(
    headers: dict[str, Any], has_type: bool
) -> None:
    more = {"content_type": "application/json", "content_encoding": "utf-8"} if has_type else {}
    frame = frame_of(headers, correlation_id="id-1", **more)
    cut = without_our_deaths(frame)
    info = {"exchange": LEVELS[0]}
    assert unwrap(read(cut), info) == unwrap(read(frame), info)


def test_the_deaths_of_delay_queues_are_not_parsed() -> None:
    deaths = [{"queue": level, "count": 1, "reason": "expired"} for level in LEVELS]
    headers = {"task": "a", "x-death": deaths, "x-first-death-queue": LEVELS[0], "zeta": 1}
    left = read(without_our_deaths(frame_of(headers)))["application_headers"]
    assert left == {"task": "a", "zeta": 1}
    assert left.keys().isdisjoint(DEATH_HEADERS)


@pytest.mark.parametrize("size", [0, 13, 20, 60, -1])
def test_a_broken_frame_is_left_to_py_amqp(size: int) -> None:
    frame = frame_of({"x-death": [{"queue": LEVELS[0]}], "zeta": "a"})[:size]
    assert without_our_deaths(frame) == frame
