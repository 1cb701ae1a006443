"""RabbitMQ templates: the same bytes as py-amqp writes, or an error."""

from __future__ import annotations

import json
from typing import Any

import amqp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay.bulk.batch import short_repr
from celery_native_delay.message import Delayed
from celery_native_delay.transports.rabbitmq.channels import Publication
from celery_native_delay.transports.rabbitmq.template import (
    FramedTask,
    RabbitTemplate,
    fields_of,
    frames_of,
)
from celery_native_delay.transports.rabbitmq.wrapping import wrap

saferepr = pytest.importorskip("celery.utils.saferepr").saferepr

texts = st.text(max_size=80)
names = st.text(min_size=1, max_size=60)
ids = st.one_of(st.uuids().map(str), names)
#: id, eta and root_id differ per task; CC and BCC are refused.
_NO_EXTRAS = ("id", "eta", "root_id", "CC", "BCC")

extras = st.dictionaries(
    st.text(min_size=1, max_size=20).filter(lambda key: key not in _NO_EXTRAS),
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), texts),
    max_size=4,
)


@st.composite
def kinds(draw: st.DrawFn) -> dict[str, Any]:
    """The values that all tasks of one kind share."""
    return {
        "task": draw(names),
        "is_root": draw(st.booleans()),
        "extra": draw(extras),
        "priority": draw(st.none() | st.integers(0, 9)),
        "content_type": draw(st.sampled_from(["application/json", "text/plain"])),
        "reply_to": draw(st.sampled_from(["", "1234-reply"])),
        "key": draw(st.text(max_size=100).filter(lambda key: len(key.encode()) < 180)),
        "exchange": draw(st.sampled_from(["", "shop", "é%b"])),
    }


def publication(draw: Any, kind: dict[str, Any]) -> Publication:
    task_id = draw(ids)
    roots = kind["is_root"]
    headers = {
        "lang": "py",
        "task": kind["task"],
        "id": task_id,
        "eta": draw(st.sampled_from(["2026-11-20T12:00:00+00:00", "2026-11-20T12:00:00.5"])),
        "root_id": task_id if roots else "root",
        "parent_id": None,
        "timelimit": [None, None],
        "argsrepr": draw(texts),
        "kwargsrepr": draw(texts),
        **kind["extra"],
    }
    properties = {
        "content_type": kind["content_type"],
        "content_encoding": "utf-8",
        "application_headers": headers,
        "delivery_mode": 2,
        "priority": kind["priority"],
        "correlation_id": task_id,
        "reply_to": kind["reply_to"],
    }
    wrapped = wrap(
        properties,
        Delayed(
            draw(st.uuids()).hex, draw(st.integers(2**45, 2**51)), kind["exchange"], kind["key"]
        ),
        now_us=0,
        limit_priority=False,
    )
    wrapped["expiration"] = str(draw(st.integers(1, 10**9)))
    body = draw(st.binary(max_size=200) | st.integers(0, 9_000).map(lambda size: b"x" * size))
    levels = "celery_delay.v1.31x125ms.f15.quorum.level-07.entry"
    return Publication(amqp.Message(body, **wrapped), levels, f"0.1.{kind['key']}")


@given(st.data(), kinds())
def test_the_frames_of_a_template_are_py_amqps(data: st.DataObject, kind: dict[str, Any]) -> None:
    """The template is made of one task and used for another of its kind; long bodies are split."""
    template = RabbitTemplate(publication(data.draw, kind).message.properties)
    other = publication(data.draw, kind)
    where = {"channel_id": data.draw(st.integers(1, 2047)), "frame_max": 4096}
    assert template.frames(fields_of(other), **where) == frames_of(other, **where)


@given(st.data(), kinds())
def test_a_refused_task_of_a_template_looks_like_any_refused_task(
    data: st.DataObject, kind: dict[str, Any]
) -> None:
    template = RabbitTemplate(publication(data.draw, kind).message.properties)
    other = publication(data.draw, kind)
    to = (kind["exchange"], kind["key"])
    framed = FramedTask(template, fields_of(other), to)
    assert framed.refused("why") == other.refused("why")
    assert framed.id == other.id


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"application_headers": {"id": "a", "eta": "b"}, "correlation_id": "other"},
        {"application_headers": {"id": "a", "eta": "b"}, "correlation_id": "a"},
    ],
)
def test_a_template_refuses_anything_but_a_delayed_task(properties: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected a delayed Celery task"):
        RabbitTemplate(properties)


simple = st.one_of(st.none(), st.booleans(), st.integers(), texts)


@given(
    st.lists(simple) | st.lists(simple).map(tuple) | st.dictionaries(texts, simple),
    st.integers(0, 200),
)
def test_our_short_repr_is_celerys(arguments: Any, max_size: int) -> None:
    text = short_repr(arguments, max_size)
    assert text is None or text == saferepr(arguments, max_size)


def test_nested_arguments_are_left_to_celerys_repr() -> None:
    assert short_repr(([],), 1024) is None
    assert short_repr({"a": json}, 1024) is None
