"""The frames of a publish, encoded once and filled in for each message.

py-amqp takes some 60 µs to encode the headers of a task. Between tasks of one kind only a few
fields differ; the bytes around them are py-amqp's own, split where a marked value stood.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from struct import Struct
from typing import Any, NamedTuple

import amqp
from amqp import spec
from amqp.serialization import dumps

from ...core.refusal import RefusedMessage
from .envelope import HEADER

_METHOD = Struct(">BHIHHH")
_HEADER_FRAME = Struct(">BHIHHQ")
_FRAME = Struct(">BHI")
_LONG = Struct(">I")
_LONG_STRING = Struct(">cI")
_DUE = Struct(">cq")
_END = b"\xce"

#: What each frame takes beside its payload; the payload of one is at most frame_max less this.
FRAME_BYTES = 8

_MARKS = {
    b"id": "\0task id\0",
    b"eta": "\0eta\0",
    b"args": "\0argsrepr\0",
    b"kwargs": "\0kwargsrepr\0",
    b"delivery": "\0delivery id\0",
}
_MARKED_DUE = 0x7EED_0DE1_0DE1_0DE1
_MARKED_EXPIRATION = "\0expiration\0"


class TaskFields(NamedTuple):
    """What differs between two tasks of one kind. *body* is encoded; *due_ms* is None, and
    *delivery_id* and *expiration* are empty, for a task that is due already.
    """

    exchange: str
    routing_key: str
    task_id: str
    eta: str
    argsrepr: str
    kwargsrepr: str
    body: bytes
    delivery_id: str = ""
    due_ms: int | None = None
    expiration: str = ""


class Template:
    """Frames for tasks like *properties*, those of one that was published the long way.

    Raises:
        ValueError: they are not a task's, so that nothing is known about what differs.
    """

    def __init__(self, properties: Mapping[str, Any]) -> None:
        headers = dict(properties.get("application_headers") or {})
        task_id = headers.get("id")
        if not task_id or properties.get("correlation_id") != task_id or not headers.get("eta"):
            raise ValueError("expected a Celery task of protocol 2 with an ETA")
        self.user_headers = dict(headers)
        self.envelope = dict(self.user_headers.pop(HEADER, {}))
        marked = {**headers, "id": _MARKS[b"id"], "eta": _MARKS[b"eta"]}
        marked |= {"argsrepr": _MARKS[b"args"], "kwargsrepr": _MARKS[b"kwargs"]}
        if headers.get("root_id") == task_id:
            marked["root_id"] = _MARKS[b"id"]
        if self.envelope:
            envelope = {**self.envelope, "id": _MARKS[b"delivery"], "due": _MARKED_DUE}
            marked[HEADER] = envelope
        self._table = _format_of(marked, nested=bool(self.envelope))
        self._plain = _frame_parts({**properties, "expiration": None})
        self._expiring = _frame_parts({**properties, "expiration": _MARKED_EXPIRATION})

    def frames(self, fields: TaskFields, *, channel_id: int, frame_max: int) -> bytes:
        """The bytes that publish *fields* on a channel, as py-amqp writes them."""
        task_id = fields.task_id.encode()
        values = {
            b"id": _long_string(task_id),
            b"eta": _long_string(fields.eta.encode()),
            b"args": _long_string(fields.argsrepr.encode("utf-8", "surrogatepass")),
            b"kwargs": _long_string(fields.kwargsrepr.encode("utf-8", "surrogatepass")),
        }
        if fields.due_ms is not None:
            values[b"delivery"] = _long_string(fields.delivery_id.encode())
            values[b"due"] = _DUE.pack(b"L", fields.due_ms)
        table = self._table % values
        head, tail = self._plain
        correlation = _short_string(task_id)
        if fields.expiration:
            head, tail = self._expiring
            tail = tail % (correlation, _short_string(fields.expiration.encode()))
        else:
            tail = tail % correlation
        exchange, key = fields.exchange.encode(), fields.routing_key.encode()
        body = fields.body
        parts = [
            _METHOD.pack(1, channel_id, 9 + len(exchange) + len(key), *spec.Basic.Publish, 0),
            _short_string(exchange),
            _short_string(key),
            b"\x01" + _END if fields.due_ms is not None else b"\x00" + _END,
            _HEADER_FRAME.pack(
                2, channel_id, 16 + len(head) + len(table) + len(tail), 60, 0, len(body)
            ),
            head,
            _LONG.pack(len(table)),
            table,
            tail,
            _END,
        ]
        most = frame_max - FRAME_BYTES
        if 0 < len(body) <= most:
            parts += (_FRAME.pack(3, channel_id, len(body)), body, _END)
        else:
            for at in range(0, len(body), most):
                chunk = body[at : at + most]
                parts += (_FRAME.pack(3, channel_id, len(chunk)), chunk, _END)
        return b"".join(parts)

    def headers(self, fields: TaskFields) -> dict[str, Any]:
        """The user's headers of a task, as they would be without the template."""
        headers = dict(self.user_headers)
        if headers.get("root_id") == headers["id"]:
            headers["root_id"] = fields.task_id
        return headers | {
            "id": fields.task_id,
            "eta": fields.eta,
            "argsrepr": fields.argsrepr,
            "kwargsrepr": fields.kwargsrepr,
        }


class FramedTask:
    """A task on its way whose frames come from a template; what a window keeps."""

    __slots__ = ("fields", "template", "to")

    def __init__(self, template: Template, fields: TaskFields, to: tuple[str, str]) -> None:
        """*to* is the user's own exchange and routing key."""
        self.template = template
        self.fields = fields
        self.to = to

    @property
    def exchange(self) -> str:
        """The exchange it is published to."""
        return self.fields.exchange

    @property
    def id(self) -> Hashable:
        """What the message is known by when the broker returns it."""
        fields = self.fields
        return fields.delivery_id or (fields.exchange, fields.routing_key, fields.task_id.encode())

    def write(self, channel: Any) -> None:
        """Hand its frames to *channel*, which sends many at a time."""
        frame_max = channel.connection.frame_max
        channel.write_soon(
            self.template.frames(self.fields, channel_id=channel.channel_id, frame_max=frame_max)
        )

    def refused(self, reason: str) -> RefusedMessage:
        """What is reported if the broker does not take it."""
        headers = self.template.headers(self.fields)
        delivery_id = self.fields.delivery_id or None
        return RefusedMessage(reason, *self.to, headers, self.fields.body, delivery_id)


def _format_of(marked: dict[str, Any], *, nested: bool) -> bytes:
    """The table as a format in which the marked values stand as names."""
    table: bytes = dumps("F", [marked])[_LONG.size :]
    table = table.replace(b"%", b"%%")
    for name, mark in _MARKS.items():
        table = table.replace(_long_string(mark.encode()), b"%(" + name + b")b")
    table = table.replace(_DUE.pack(b"L", _MARKED_DUE), b"%(due)b")
    if not nested:
        return table
    # The envelope is a table in the table, with a length of its own; delivery ids have one length.
    excess = len(_MARKS[b"delivery"]) - _DELIVERY_ID_BYTES
    name_at = table.index(bytes([len(HEADER)]) + HEADER.encode() + b"F") + 2 + len(HEADER)
    (size,) = _LONG.unpack_from(table, name_at)
    return table[:name_at] + _LONG.pack(size - excess) + table[name_at + _LONG.size :]


_DELIVERY_ID_BYTES = 32


def _frame_parts(properties: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """What stands before and after the headers; the latter is a format."""
    mark = _MARKS[b"id"]
    marked = {**properties, "application_headers": {}, "correlation_id": mark}
    whole = bytes(amqp.Message("", **marked)._serialize_properties()).replace(b"%", b"%%")
    at = 2
    for name in ("content_type", "content_encoding"):
        if properties.get(name) is not None:
            at += 1 + len(properties[name].encode())
    tail = whole[at + _LONG.size :].replace(_short_string(mark.encode()), b"%b")
    tail = tail.replace(_short_string(_MARKED_EXPIRATION.encode()), b"%b")
    return whole[:at].replace(b"%%", b"%"), tail


def _long_string(text: bytes) -> bytes:
    return _LONG_STRING.pack(b"S", len(text)) + text


def _short_string(text: bytes) -> bytes:
    return bytes((len(text),)) + text
