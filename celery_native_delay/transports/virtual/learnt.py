"""Templates of messages to kombu's virtual transports: their envelopes and their destination."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...due_time import milliseconds_up
from .. import bulk_publisher
from ..bulk_publisher import BulkPublisher, TaskValues, differing
from ..random_ids import RandomIds
from .collecting import Put
from .outbox import Outbox
from .template import TaskFields, Template, fields_of


class Learnt(bulk_publisher.Learnt):
    """A template of envelopes, for messages that go where *put* goes."""

    def __init__(self, template: Template, put: Put, body: bytes) -> None:
        super().__init__(body)
        self._template = template
        self._put = put

    @classmethod
    def of(cls, message: Put, channel: Any) -> Learnt | None:
        if not message.due_us:
            return None
        text = text_of(message)
        envelope = json.loads(text)
        try:
            template, fields = Template(envelope), fields_of(envelope)
        except ValueError:
            return None
        return cls(template, message, fields.body) if template.envelope(fields) == text else None

    @staticmethod
    def headers_of(message: Put) -> Mapping[str, Any]:
        return json.loads(text_of(message)).get("headers") or {}

    def difference(self, message: Put, values: TaskValues) -> str:
        found = json.loads(text_of(message))
        try:
            theirs = fields_of(found)
        except ValueError:
            return "its headers"
        tag = theirs.delivery_tag
        text = self._template.envelope(TaskFields(*values, theirs.due_ms, tag))
        if message == self._put.another(
            text, due_us=message.due_us, task_id=values[0], delivery_tag=tag
        ):
            return ""
        made = json.loads(text)
        return (
            differing("header", made.pop("headers"), found.pop("headers"))
            or differing("property", made.pop("properties"), found.pop("properties"))
            or differing("part", made, found)
            or "its destination"
        )

    def another(self, channel: Any, ids: RandomIds, due_us: int, values: TaskValues) -> Put:
        channel.delays.check_reach(due_us)
        tag = ids.uuid()
        envelope = self._template.envelope(TaskFields(*values, milliseconds_up(due_us), tag))
        return self._put.another(envelope, due_us=due_us, task_id=values[0], delivery_tag=tag)


def publisher(outbox: Outbox[Any, Any]) -> BulkPublisher:
    """A publisher of many messages through *outbox*."""
    return BulkPublisher(outbox, Learnt)


def text_of(put: Put) -> str:
    """kombu's message in *put*, as JSON."""
    return put.envelope if isinstance(put.envelope, str) else put.envelope.decode()
