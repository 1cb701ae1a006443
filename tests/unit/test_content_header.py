"""Headers are read from a frame as py-amqp decodes them, without the record of a wait."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from struct import pack
from typing import Any

import amqp
import pytest
from amqp.serialization import decode_properties_basic
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay.transports.rabbitmq.content_header import read_headers
from celery_native_delay.transports.rabbitmq.envelope import DEATH_HEADERS

LEVEL = "celery_delay.v1.31x125ms.f12.quorum.level-07"
COUNT = 2**40
CLASS_AND_SIZE = pack(">HHQ", 60, 0, 4)

texts = st.one_of(
    st.text(max_size=60), st.sampled_from(["x-death", "\x07x-deathA", "\x05queueS", LEVEL])
)
RARE = (Decimal(3), datetime(2026, 11, 20, tzinfo=UTC), -(2**40))
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(1 - 2**31, 2**31 - 1),
        st.floats(allow_nan=False),
        texts,
    ),
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=5,
)
others = st.dictionaries(texts.filter(lambda key: key not in DEATH_HEADERS), values, max_size=5)


def death(queue: str, *, is_sorted: bool = False, **more: Any) -> dict[str, Any]:
    """An entry as RabbitMQ writes it: 3.10 sorts its fields, 4.3 does not."""
    entry = {
        "count": COUNT,
        "reason": "expired",
        "queue": queue,
        "time": datetime(2026, 11, 20, tzinfo=UTC),
        "exchange": LEVEL,
        "routing-keys": ["0.0.1.%.celery"],
        **more,
    }
    return dict(sorted(entry.items())) if is_sorted else entry


def frame(headers: dict[str, Any] | None, **properties: Any) -> bytes:
    message = amqp.Message("body", application_headers=headers, **properties)
    # RabbitMQ writes a signed 64-bit integer as `l`, py-amqp as `L`.
    count = b"\x05countL" + pack(">q", COUNT)
    properties_of_it = bytes(message._serialize_properties())
    return CLASS_AND_SIZE + properties_of_it.replace(count, count.replace(b"L", b"l", 1))


def decoded(header: bytes) -> dict[str, Any]:
    properties, end = decode_properties_basic(header, len(CLASS_AND_SIZE))
    assert end == len(header)
    return dict(properties)


def read(header: bytes) -> dict[str, Any]:
    """All properties, the headers as we read them; none if we leave them to py-amqp."""
    without, headers = read_headers(header)
    if headers is None:
        assert without == header
        return {}
    properties = decoded(without)
    assert properties["application_headers"] == {}
    return {**properties, "application_headers": headers}


@given(before=others, after=others, content=st.booleans(), is_sorted=st.booleans())
def test_all_is_read_but_own_deaths(
    before: dict[str, Any], after: dict[str, Any], content: bool, is_sorted: bool
) -> None:
    properties = {"content_type": "application/json", "content_encoding": "utf-8"}
    properties |= {"priority": 3, "reply_to": "x-death"}
    if not content:
        del properties["content_type"], properties["content_encoding"]
    deaths = [
        death(f"{LEVEL}-f", is_sorted=is_sorted),
        death(LEVEL, is_sorted=is_sorted, **{"original-expiration": "20"}),
    ]
    record = {"x-death": deaths, **dict.fromkeys(DEATH_HEADERS[1:], LEVEL)}
    whole = frame({**before, **record, **after}, **properties)
    expected = decoded(whole)
    for name in DEATH_HEADERS:
        del expected["application_headers"][name]
    assert read(whole) == expected


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param([death(LEVEL), death("theirs")], id="theirs too"),
        pytest.param([death("theirs")], id="theirs"),
        pytest.param(
            [death("theirs", exchange=f"\x05queueS\0\0\0\x28{LEVEL}", is_sorted=True)],
            id="ours in it",
        ),
        pytest.param([{"count": 1}], id="no queue"),
        pytest.param(["text"], id="no table"),
        pytest.param("text", id="no array"),
    ],
)
def test_other_peoples_deaths_are_py_amqps(deaths: Any) -> None:
    assert read(frame({"x-death": deaths, "task": "shop.remind"})) == {}


@given(others)
def test_a_message_without_deaths_is_read_too(headers: dict[str, Any]) -> None:
    whole = frame({"argsrepr": "\x07x-deathA", **headers})
    assert read(whole) == decoded(whole)
    assert read(frame({"count": COUNT}))["application_headers"] == {"count": COUNT}
    assert read(frame(None)) == {}


@pytest.mark.parametrize("value", RARE, ids=repr)
def test_what_is_rare_is_py_amqps(value: Any) -> None:
    """Its releases differ in what some types mean."""
    assert read(frame({"task": "shop.remind", "theirs": [value]})) == {}


@given(st.data())
def test_what_no_broker_writes_stays_for_py_amqp_to_complain(data: st.DataObject) -> None:
    whole = frame({"x-death": [death(LEVEL)], "task": "shop.remind"})
    read_headers(whole[: data.draw(st.integers(0, len(whole) - 1))])
    at = data.draw(st.integers(len(CLASS_AND_SIZE), len(whole) - 1))
    read_headers(whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :])
