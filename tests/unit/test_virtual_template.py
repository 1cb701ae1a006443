"""Templates for kombu's virtual transports: the same envelopes, or an error; and random ids."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils.json import dumps

from celery_native_delay.due_time import eta_of
from celery_native_delay.transports.bulk_publisher import RandomIds
from celery_native_delay.transports.virtual.template import (
    VirtualTaskTemplate,
    refused_of,
    values_of,
)
from celery_native_delay.transports.virtual.wrapping import encoded, wrapped

PUT: Any = None
"""The collected message, which no text needs."""

texts = st.text(max_size=80)
names = st.text(min_size=1, max_size=60)
ids = st.one_of(st.uuids().map(str), names)
own = ("id", "eta", "root_id", "argsrepr", "kwargsrepr", "task", "native_delay")
extras = st.dictionaries(
    names.filter(lambda name: name not in own),
    st.one_of(st.none(), st.booleans(), st.floats(allow_nan=False), st.integers(), texts)
    | st.lists(texts, max_size=2),
    max_size=4,
)


@st.composite
def kinds(draw: st.DrawFn) -> dict[str, Any]:
    """The values that all tasks of one kind share."""
    return {
        "task": draw(names),
        "is_root": draw(st.booleans()),
        "extra": draw(extras),
        "priority": draw(st.integers(0, 9)),
        "reply_to": draw(st.sampled_from(["", "1234-reply"])),
        "to": {"exchange": draw(texts), "routing_key": draw(texts)},
    }


def envelope(draw: Any, kind: dict[str, Any]) -> dict[str, Any]:
    """An envelope as our channel stores it."""
    task_id = draw(ids)
    body = draw(st.binary(max_size=200))
    due_ms = draw(st.integers(2**40, 2**41))
    message = {
        "body": b64encode(body).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {
            "lang": "py",
            "task": kind["task"],
            "id": task_id,
            "eta": eta_of(due_ms * 1000),
            "root_id": task_id if kind["is_root"] else "root",
            "argsrepr": draw(texts),
            "kwargsrepr": draw(texts),
            **kind["extra"],
        },
        "properties": {
            "correlation_id": task_id,
            "reply_to": kind["reply_to"],
            "delivery_mode": 2,
            "delivery_info": kind["to"],
            "priority": kind["priority"],
            "body_encoding": "base64",
            "delivery_tag": draw(ids),
        },
    }
    return wrapped(message, due_ms=due_ms)


@given(st.data(), kinds())
def test_the_envelope_of_a_template_is_the_channels(
    data: st.DataObject, kind: dict[str, Any]
) -> None:
    """The template is made of one task and used for another of its kind."""
    template = VirtualTaskTemplate(envelope(data.draw, kind), PUT)
    other = envelope(data.draw, kind)
    assert template.filled(*values_of(other)) == encoded(other)


@given(st.data(), kinds())
def test_a_refused_task_has_all_that_is_needed_to_send_it_again(
    data: st.DataObject, kind: dict[str, Any]
) -> None:
    one = envelope(data.draw, kind)
    refused = refused_of("why", dumps(one))
    assert (refused.reason, refused.task_id) == ("why", one["headers"]["id"])
    assert (refused.exchange, refused.routing_key) == tuple(kind["to"].values())
    assert refused.headers == {k: v for k, v in one["headers"].items() if k != "native_delay"}
    assert b64encode(refused.body).decode() == one["body"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"headers": {}}, "a delayed Celery task"),
        ({"properties": {"correlation_id": "other"}}, "a delayed Celery task"),
        ({"properties": {"correlation_id": "1", "body_encoding": None}}, "a body in base64"),
    ],
)
def test_a_template_refuses_anything_but_a_delayed_task(change: dict[str, Any], text: str) -> None:
    good = {
        "body": "",
        "headers": {"id": "1", "native_delay": {"v": 1, "due": 0}},
        "properties": {"correlation_id": "1", "body_encoding": "base64", "delivery_tag": "t"},
    }
    VirtualTaskTemplate(good, PUT)
    with pytest.raises(ValueError, match=f"expected {text}"):
        VirtualTaskTemplate(json.loads(json.dumps(good | change)), PUT)


def test_uuids_are_valid_and_differ() -> None:
    ids = RandomIds()
    made = [ids.uuid() for _ in range(1_000)]
    assert len(set(made)) == 1_000
    for text in made:
        uuid = UUID(text)
        assert (str(uuid), uuid.version, uuid.variant) == (text, 4, RFC_4122)


def test_plain_ids_are_128_bits() -> None:
    ids = RandomIds()
    made = [ids.hex() for _ in range(1_000)]
    assert len(set(made)) == 1_000
    assert all(0 <= int(text, 16) < 2**128 and len(text) == 32 for text in made)
