"""Encode kombu's message as JSON once, then fill in the values of each task.

A full encoding takes about 60 µs per message. Messages of tasks with the same options differ only
in a few values, such as the id and the arguments.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as as_json
from secrets import token_hex
from typing import Any, NamedTuple, Protocol, Self

from ...due_time import milliseconds_up
from ...errors import RefusedMessage
from ...message import HEADER
from .. import bulk_publisher
from ..bulk_publisher import Form, RandomIds, TaskValues, marked
from .wrapping import encoded, unwrapped


class CollectedMessage(Protocol):
    """An encoded message that a bulk publisher will send to one queue."""

    @property
    def due_us(self) -> int:
        """Return the due time (µs since the epoch), or 0 for an immediate message."""

    @property
    def envelope(self) -> str | bytes:
        """Return kombu's message as JSON, with this package's header if delayed."""

    @property
    def size_bytes(self) -> int:
        """Return the message's approximate size in bytes."""

    def another(self, envelope: str, *, due_us: int, task_id: str, delivery_tag: str) -> Self:
        """Return a copy of this message with another task's content, id and due time."""


class VirtualTaskFields(NamedTuple):
    """The values that differ between the messages of tasks with the same options."""

    task_id: str
    eta: str
    argsrepr: str
    kwargsrepr: str
    body: bytes  # not in base64
    due_ms: int
    delivery_tag: str


class VirtualTemplate:
    """Makes copies of a delayed message with another id, ETA and arguments."""

    def __init__(self, envelope: Mapping[str, Any]) -> None:
        headers, properties = envelope.get("headers") or {}, envelope["properties"]
        task_id = headers.get("id")
        if HEADER not in headers or not task_id or properties.get("correlation_id") != task_id:
            raise ValueError("expected a delayed Celery task of protocol 2")
        if properties.get("body_encoding") != "base64":
            raise ValueError(f"expected a body in base64, got {properties.get('body_encoding')!r}")
        # The marks are random texts, which no message contains.
        marks = {name: f"{name} {token_hex(16)}" for name in VirtualTaskFields._fields}
        own = {**headers[HEADER], "due": marks["due_ms"]}
        if own.get("id") == properties["delivery_tag"]:
            own["id"] = marks["delivery_tag"]
        differs = {"correlation_id": marks["task_id"], "delivery_tag": marks["delivery_tag"]}
        text: str = encoded(
            {
                **envelope,
                "body": marks["body"],
                "headers": marked(headers, marks) | {HEADER: own},
                "properties": {**properties, **differs},
            }
        )
        self._form = Form(text, {f'"{mark}"': at for at, mark in enumerate(marks.values())})

    def envelope(self, fields: VirtualTaskFields) -> str:
        """Return kombu's message as JSON, with the task values *fields*."""
        task_id, eta, argsrepr, kwargsrepr, body, due_ms, delivery_tag = fields
        values = (
            as_json(task_id),
            as_json(eta),
            as_json(argsrepr),
            as_json(kwargsrepr),
            f'"{b64encode(body).decode()}"',
            due_ms,
            as_json(delivery_tag),
        )
        return self._form.filled(values)


def fields_of(envelope: Mapping[str, Any]) -> VirtualTaskFields:
    """Read the values of a task (:class:`TaskFields`) from a message."""
    headers, properties = envelope["headers"], envelope["properties"]
    try:
        return VirtualTaskFields(
            headers["id"],
            headers["eta"],
            headers["argsrepr"],
            headers["kwargsrepr"],
            b64decode(envelope["body"]),
            headers[HEADER]["due"],
            properties["delivery_tag"],
        )
    except KeyError as exc:
        raise ValueError(f"expected a delayed Celery task with {exc}") from exc


def refused_of(reason: str, text: str | bytes) -> RefusedMessage:
    """Return a report about a refused message; *text* is the message as JSON."""
    envelope = json.loads(text)
    properties = envelope["properties"]
    headers, delayed = unwrapped(envelope.get("headers"), properties)
    info = properties.get("delivery_info") or {}
    body = envelope["body"]
    return RefusedMessage(
        reason,
        info.get("exchange") or "",
        info.get("routing_key") or "",
        headers,
        b64decode(body) if properties.get("body_encoding") == "base64" else body,
        None if delayed is None else properties["delivery_tag"],
    )


class VirtualTaskTemplate(bulk_publisher.TaskTemplate):
    """Makes the messages of tasks that have the same destination and options."""

    def __init__(self, template: VirtualTemplate, put: CollectedMessage, body: bytes) -> None:
        super().__init__(body)
        self._template = template
        self._put = put

    @classmethod
    def of(cls, message: CollectedMessage, channel: Any) -> VirtualTaskTemplate | None:
        if not message.due_us:
            return None
        text = text_of(message)
        envelope = json.loads(text)
        try:
            template, fields = VirtualTemplate(envelope), fields_of(envelope)
        except ValueError:
            return None
        return cls(template, message, fields.body) if template.envelope(fields) == text else None

    @staticmethod
    def headers_of(message: CollectedMessage) -> Mapping[str, Any]:
        return json.loads(text_of(message)).get("headers") or {}

    def makes(self, message: CollectedMessage, values: TaskValues) -> bool:
        try:
            theirs = fields_of(json.loads(text_of(message)))
        except ValueError:
            return False
        tag = theirs.delivery_tag
        text = self._template.envelope(VirtualTaskFields(*values, theirs.due_ms, tag))
        due_us = message.due_us
        return message == self._put.another(
            text, due_us=due_us, task_id=values[0], delivery_tag=tag
        )

    def another(
        self, channel: Any, ids: RandomIds, due_us: int, values: TaskValues
    ) -> CollectedMessage:
        channel.delays.check_reach(due_us)
        tag = ids.uuid()
        envelope = self._template.envelope(VirtualTaskFields(*values, milliseconds_up(due_us), tag))
        return self._put.another(envelope, due_us=due_us, task_id=values[0], delivery_tag=tag)


def text_of(put: CollectedMessage) -> str:
    """Return kombu's message as a JSON string."""
    return put.envelope if isinstance(put.envelope, str) else put.envelope.decode()
