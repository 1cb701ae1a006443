"""Publishes are written as py-amqp writes them, byte for byte, whatever a message carries."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import amqp
import pytest
from amqp import method_framing
from amqp.exceptions import FrameSyntaxError
from amqp.serialization import dumps
from amqp.spec import Basic, Channel
from hypothesis import assume, example, given
from hypothesis import strategies as st

from celery_native_delay.transports.rabbitmq.frame_writer import frame_writer

FRAME_MAX = 4096

names = st.text(max_size=40)
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.text(max_size=60),
        st.binary(max_size=10),
        st.just(Decimal("3.25")),
        st.just(datetime(2026, 11, 20, tzinfo=UTC)),
    ),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(names, inner),
    max_leaves=6,
)
properties = st.fixed_dictionaries(
    {},
    optional={
        "content_type": st.just("application/json"),
        "content_encoding": st.sampled_from(["utf-8", "binary"]),
        "application_headers": st.dictionaries(names, values, max_size=6),
        "delivery_mode": st.sampled_from([1, 2]),
        "priority": st.integers(0, 255),
        "correlation_id": names,
        "reply_to": names,
        "expiration": st.just("60000"),
        "message_id": names,
        "timestamp": st.integers(0, 2**63),
    },
)


class Wire:
    """A connection and its transport that keep what is written."""

    frame_max = FRAME_MAX
    bytes_sent = 0

    def __init__(self) -> None:
        self.written = b""

    def write(self, frames: Any) -> None:
        self.written += bytes(frames)


def written(
    writer: Any, message: Any, method: tuple[int, int] = Basic.Publish, arguments: Any = b""
) -> tuple[bytes, int]:
    """What reaches the wire, and what the heartbeat will see of it."""
    wire = Wire()
    writer(wire, wire)(1, 7, method, arguments, message)
    return wire.written, wire.bytes_sent


@given(
    properties=properties,
    body=st.binary(max_size=80) | st.text(max_size=80),
    routing_key=names,
    mandatory=st.booleans(),
)
@example({}, b"x" * (FRAME_MAX - 8), "one frame", True)
@example({}, b"x" * (FRAME_MAX - 7), "two frames", True)
@example({"application_headers": {"long": "x" * (FRAME_MAX - 80)}}, b"x", "large headers", True)
@example({"application_headers": {"too long": "x" * FRAME_MAX}}, b"x", "larger headers", True)
def test_the_bytes_are_py_amqps(
    properties: dict[str, Any], body: Any, routing_key: str, mandatory: bool
) -> None:
    assume(isinstance(body, bytes) or properties.get("content_encoding") != "binary")
    arguments = dumps("Bssbb", (0, "jobs", routing_key, mandatory, False))
    theirs, ours = (
        written(writer, amqp.Message(body, **properties), arguments=arguments)
        for writer in (method_framing.frame_writer, frame_writer)
    )
    assert ours == theirs


def test_other_methods_are_py_amqps() -> None:
    arguments = dumps("s", [""])
    theirs = written(method_framing.frame_writer, None, Channel.Open, arguments)
    assert written(frame_writer, None, Channel.Open, arguments) == theirs


@pytest.mark.parametrize(
    ("properties", "error"),
    [
        ({"application_headers": {"a set": {1}}}, FrameSyntaxError),
        ({"application_headers": {"deep": {"a set": {1}}}}, FrameSyntaxError),
        ({"application_headers": {"n" * 256: 1}}, Exception),
        ({"correlation_id": "n" * 256}, Exception),
        ({"priority": "high"}, Exception),
        ({"application_headers": {"large": 2**63}}, Exception),
    ],
    ids=["header", "inner header", "long name", "long id", "priority", "large number"],
)
def test_what_amqp_cannot_express_is_refused_as_by_py_amqp(
    properties: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as theirs:
        written(method_framing.frame_writer, amqp.Message(b"x", **properties))
    with pytest.raises(type(theirs.value)) as ours:
        written(frame_writer, amqp.Message(b"x", **properties))
    assert str(ours.value) == str(theirs.value)
