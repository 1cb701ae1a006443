"""Templates of a batch: the same bytes as py-amqp and kombu's channels write, or an error."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any
from uuid import RFC_4122, UUID

import amqp
import pytest
from celery.utils.saferepr import saferepr
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils.json import dumps

from celery_native_delay.bulk.batch import short_repr
from celery_native_delay.due_time import eta_of
from celery_native_delay.message import Delayed
from celery_native_delay.transports.bulk_publisher import RandomIds
from celery_native_delay.transports.rabbitmq.channels import Publication
from celery_native_delay.transports.rabbitmq.template import (
    FramedTask,
    RabbitTemplate,
    fields_of,
    frames_of,
)
from celery_native_delay.transports.rabbitmq.wrapping import wrap
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

#: Headers that differ per task, are written otherwise, or are refused (CC and BCC).
OTHERS = ("id", "eta", "root_id", "argsrepr", "kwargsrepr", "task", "native_delay", "CC", "BCC")

simple = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), texts)
extras = st.dictionaries(
    st.text(min_size=1, max_size=20).filter(lambda name: name not in OTHERS),
    simple | st.floats(allow_nan=False) | st.lists(texts, max_size=2),
    max_size=4,
)

#: The values that all tasks of one kind share.
kinds = st.fixed_dictionaries(
    {
        "task": names,
        "is_root": st.booleans(),
        "extra": extras,
        "priority": st.integers(0, 9),
        "content_type": st.sampled_from(["application/json", "text/plain"]),
        "reply_to": st.sampled_from(["", "1234-reply"]),
        "key": st.text(max_size=100).filter(lambda key: len(key.encode()) < 180),
        "exchange": st.sampled_from(["", "shop", "é%b"]),
    }
)
Kind = dict[str, Any]


def headers_of(draw: Any, kind: Kind, task_id: str, eta: str) -> dict[str, Any]:
    return {
        "lang": "py",
        "task": kind["task"],
        "id": task_id,
        "eta": eta,
        "root_id": task_id if kind["is_root"] else "root",
        "parent_id": None,
        "timelimit": [None, None],
        "argsrepr": draw(texts),
        "kwargsrepr": draw(texts),
        **kind["extra"],
    }


# ---- on RabbitMQ ---------------------------------------------------------------------------------


def publication(draw: Any, kind: Kind) -> Publication:
    task_id = draw(ids)
    eta = draw(st.sampled_from(["2026-11-20T12:00:00+00:00", "2026-11-20T12:00:00.5"]))
    properties = {
        "content_type": kind["content_type"],
        "content_encoding": "utf-8",
        "application_headers": headers_of(draw, kind, task_id, eta),
        "delivery_mode": 2,
        "priority": kind["priority"] or None,
        "correlation_id": task_id,
        "reply_to": kind["reply_to"],
    }
    due_us = draw(st.integers(2**45, 2**51))
    delayed = Delayed(draw(st.uuids()).hex, due_us, kind["exchange"], kind["key"])
    waits = wrap(properties, delayed, now_us=0, limit_priority=False)
    waits["expiration"] = str(draw(st.integers(1, 10**9)))
    body = draw(st.binary(max_size=200) | st.integers(0, 9_000).map(lambda size: b"x" * size))
    levels = "celery_delay.v1.31x125ms.f15.quorum.level-07.entry"
    return Publication(amqp.Message(body, **waits), levels, f"0.1.{kind['key']}")


@given(st.data(), kinds)
def test_the_frames_of_a_template_are_py_amqps(data: st.DataObject, kind: Kind) -> None:
    """The template is made of one task and used for another of its kind; long bodies are split."""
    template = RabbitTemplate(publication(data.draw, kind).message.properties)
    other = publication(data.draw, kind)
    where = {"channel_id": data.draw(st.integers(1, 2047)), "frame_max": 4096}
    assert template.frames(fields_of(other), **where) == frames_of(other, **where)
    framed = FramedTask(template, fields_of(other), (kind["exchange"], kind["key"]))
    assert (framed.id, framed.refused("why")) == (other.id, other.refused("why"))


def test_rabbitmqs_template_refuses_anything_but_a_delayed_task() -> None:
    headers = {"application_headers": {"id": "a", "eta": "b"}}
    for properties in ({}, headers | {"correlation_id": "b"}, headers | {"correlation_id": "a"}):
        with pytest.raises(ValueError, match="expected a delayed Celery task"):
            RabbitTemplate(properties)


# ---- on other brokers ----------------------------------------------------------------------------


def envelope(draw: Any, kind: Kind) -> dict[str, Any]:
    """An envelope as our channel stores it."""
    task_id, due_ms = draw(ids), draw(st.integers(2**40, 2**41))
    message = {
        "body": b64encode(draw(st.binary(max_size=200))).decode(),
        "content-encoding": "utf-8",
        "content-type": kind["content_type"],
        "headers": headers_of(draw, kind, task_id, eta_of(due_ms * 1000)),
        "properties": {
            "correlation_id": task_id,
            "reply_to": kind["reply_to"],
            "delivery_mode": 2,
            "delivery_info": {"exchange": kind["exchange"], "routing_key": kind["key"]},
            "priority": kind["priority"],
            "body_encoding": "base64",
            "delivery_tag": draw(ids),
        },
    }
    return wrapped(message, due_ms=due_ms)


@given(st.data(), kinds)
def test_the_envelope_of_a_template_is_the_channels(data: st.DataObject, kind: Kind) -> None:
    template = VirtualTaskTemplate(envelope(data.draw, kind), PUT)
    other = envelope(data.draw, kind)
    assert template.filled(*values_of(other)) == encoded(other)


@given(st.data(), kinds)
def test_a_refused_task_has_all_that_a_second_send_needs(data: st.DataObject, kind: Kind) -> None:
    one = envelope(data.draw, kind)
    refused = refused_of("why", dumps(one))
    assert (refused.reason, refused.task_id) == ("why", one["headers"]["id"])
    assert (refused.exchange, refused.routing_key) == (kind["exchange"], kind["key"])
    assert refused.headers == {k: v for k, v in one["headers"].items() if k != "native_delay"}
    assert b64encode(refused.body).decode() == one["body"]  # type: ignore[arg-type]


def test_other_brokers_template_refuses_anything_but_a_delayed_task() -> None:
    good = {
        "body": "",
        "headers": {"id": "1", "native_delay": {"v": 1, "due": 0}},
        "properties": {"correlation_id": "1", "body_encoding": "base64", "delivery_tag": "t"},
    }
    VirtualTaskTemplate(good, PUT)
    for change, text in (
        ({"headers": {}}, "a delayed Celery task"),
        ({"properties": {"correlation_id": "other"}}, "a delayed Celery task"),
        ({"properties": {"correlation_id": "1", "body_encoding": None}}, "a body in base64"),
    ):
        with pytest.raises(ValueError, match=f"expected {text}"):
            VirtualTaskTemplate(json.loads(json.dumps(good | change)), PUT)


# ---- texts and ids -------------------------------------------------------------------------------


@given(
    st.lists(simple) | st.lists(simple).map(tuple) | st.dictionaries(texts, simple),
    st.integers(0, 200),
)
def test_our_short_repr_is_celerys(arguments: Any, max_size: int) -> None:
    """Nested arguments are left to Celery's own."""
    text = short_repr(arguments, max_size)
    assert text is None or text == saferepr(arguments, max_size)
    assert short_repr(([],), 1024) is short_repr({"a": json}, 1024) is None


def test_uuids_are_valid_and_differ_and_plain_ids_have_128_bits() -> None:
    ids = RandomIds()
    plain = {ids.hex() for _ in range(1_000)}
    assert len(plain) == 1_000
    assert all(0 <= int(text, 16) < 2**128 and len(text) == 32 for text in plain)
    made = {ids.uuid() for _ in range(1_000)}
    assert len(made) == 1_000
    for text in made:
        uuid = UUID(text)
        assert (str(uuid), uuid.version, uuid.variant) == (text, 4, RFC_4122)
