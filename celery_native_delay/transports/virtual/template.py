"""Encode kombu's message as JSON once, then fill in the values of each task."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping
from typing import Any, Protocol, Self

from ...due_time import milliseconds_up
from ...errors import RefusedMessage
from ...message import HEADER
from ..bulk_publisher import JsonTemplate, RandomIds, TaskValues, marked
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


def values_of(envelope: Mapping[str, Any]) -> tuple[TaskValues, int, str]:
    """Return a message's values, due time and delivery tag. Raises ValueError if one is missing."""
    headers, properties = envelope["headers"], envelope["properties"]
    try:
        known = (headers["id"], headers["eta"], headers["argsrepr"], headers["kwargsrepr"])
        values = (*known, b64decode(envelope["body"]))
        return values, headers[HEADER]["due"], properties["delivery_tag"]
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


class VirtualTaskTemplate(JsonTemplate):
    """Makes the messages of tasks that have the same destination and options."""

    def __init__(self, envelope: Mapping[str, Any], put: CollectedMessage) -> None:
        headers, properties = envelope.get("headers") or {}, envelope["properties"]
        task_id = headers.get("id")
        if HEADER not in headers or not task_id or properties.get("correlation_id") != task_id:
            raise ValueError("expected a delayed Celery task of protocol 2")
        if properties.get("body_encoding") != "base64":
            raise ValueError(f"expected a body in base64, got {properties.get('body_encoding')!r}")

        def text(marks: dict[str, str], due_ms: int) -> str:
            own, tag = {**headers[HEADER], "due": due_ms}, marks["delivery_id"]
            if own.get("id") == properties["delivery_tag"]:
                own["id"] = tag
            differs = {"correlation_id": marks["task_id"], "delivery_tag": tag}
            return encoded(
                {
                    **envelope,
                    "body": marks["body"],
                    "headers": marked(headers, marks) | {HEADER: own},
                    "properties": {**properties, **differs},
                }
            )

        super().__init__(b64decode(envelope["body"]), text, base64=True)
        self._put = put

    @classmethod
    def of(cls, message: CollectedMessage, channel: Any) -> VirtualTaskTemplate | None:
        if not message.due_us:
            return None
        text = text_of(message)
        envelope = json.loads(text)
        try:
            template, values = cls(envelope, message), values_of(envelope)
        except ValueError:
            return None
        return template if template.filled(*values) == text else None

    @staticmethod
    def headers_of(message: CollectedMessage) -> Mapping[str, Any]:
        return json.loads(text_of(message)).get("headers") or {}

    def makes(self, message: CollectedMessage, values: TaskValues) -> bool:
        try:
            _, due_ms, tag = values_of(json.loads(text_of(message)))
        except ValueError:
            return False
        return message == self._filled_in(values, message.due_us, due_ms, tag)

    def another(
        self, channel: Any, ids: RandomIds, due_us: int, values: TaskValues
    ) -> CollectedMessage:
        channel.delays.check_reach(due_us)
        return self._filled_in(values, due_us, milliseconds_up(due_us), ids.uuid())

    def _filled_in(
        self, values: TaskValues, due_us: int, due_ms: int, tag: str
    ) -> CollectedMessage:
        text = self.filled(values, due_ms, tag)
        return self._put.another(text, due_us=due_us, task_id=values[0], delivery_tag=tag)


def text_of(put: CollectedMessage) -> str:
    """Return kombu's message as a JSON string."""
    return put.envelope if isinstance(put.envelope, str) else put.envelope.decode()
