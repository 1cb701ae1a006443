"""The frames of a publish, encoded once and filled in for each message.

py-amqp takes some 60 µs to encode the headers of a task. Between tasks of one kind only a few
fields differ; the bytes around them are py-amqp's own, split where a marked value stood.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

import amqp
from amqp import spec
from amqp.serialization import dumps

from ...errors import RefusedMessage
from ...message import HEADER

FRAME = Struct(">BHI")
FRAME_END = b"\xce"

#: What each frame takes beside its payload; the payload of one is at most frame_max less this.
FRAME_BYTES = 8

LONG = Struct(">I")

#: Packing a number takes longer than finding it.
LONGS = [LONG.pack(number) for number in range(1024)]
BYTES = [bytes((number,)) for number in range(256)]

_METHOD = Struct(">BHIHHH")
_HEADER_FRAME = Struct(">BHIHHQ")
_DUE = Struct(">q")

_DELIVERY_ID_BYTES = 32

#: What stands in for the fields that differ, in the order in which Celery's headers have them.
_ID, _ETA, _ARGS, _KWARGS = "\0task id\0", "\0eta\0", "\0argsrepr\0", "\0kwargsrepr\0"
_DELIVERY, _DUE_MS = "\0" * _DELIVERY_ID_BYTES, 0x7EED_0DE1_0DE1_0DE1
_EXPIRATION = "\0expiration\0"


class TaskFields(NamedTuple):
    """Fields that two tasks of a kind differ in; *body* is encoded, *expiration* may be empty."""

    exchange: str
    routing_key: str
    task_id: str
    eta: str
    argsrepr: str
    kwargsrepr: str
    body: bytes
    delivery_id: str
    due_ms: int
    expiration: str


class Template:
    """Frames for tasks like *properties*, those of one that was wrapped the long way.

    ValueError if they are not a delayed task's: nothing is known then about what differs.
    """

    def __init__(self, properties: Mapping[str, Any]) -> None:
        headers = dict(properties.get("application_headers") or {})
        task_id = headers.get("id")
        if HEADER not in headers or not task_id or properties.get("correlation_id") != task_id:
            raise ValueError("expected a delayed Celery task of protocol 2")
        self.user_headers = {name: headers[name] for name in headers if name != HEADER}
        self._has_root = headers.get("root_id") == task_id
        marked = {**headers, "id": _ID, "eta": _ETA, "argsrepr": _ARGS, "kwargsrepr": _KWARGS}
        if self._has_root:
            marked["root_id"] = _ID
        marked[HEADER] = {**headers[HEADER], "id": _DELIVERY, "due": _DUE_MS}
        marks = [_ID, _ETA, *([_ID] if self._has_root else []), _ARGS, _KWARGS]
        table: bytes = dumps("F", [marked])[LONG.size :]
        self._table_bytes = len(table) - sum(map(len, marks))
        table = _with_holes(
            table, [*map(_long_string, marks), _DELIVERY.encode(), _DUE.pack(_DUE_MS)]
        )
        self._plain, self._plain_bytes = _frame(table, properties, [_ID])
        self._expiring, self._expiring_bytes = _frame(
            table, {**properties, "expiration": _EXPIRATION}, [_ID, _EXPIRATION]
        )

    def frames(self, fields: TaskFields, *, channel_id: int, frame_max: int) -> bytes:
        """The bytes that publish *fields* on a channel, as py-amqp writes them."""
        exchange, key, task_id, eta, argsrepr, kwargsrepr, body, delivery, due_ms, expires = fields
        method = _method(channel_id, exchange, key)
        id_ = task_id.encode()
        eta_ = eta.encode()
        args = argsrepr.encode("utf-8", "surrogatepass")
        kwargs = kwargsrepr.encode("utf-8", "surrogatepass")
        id_field = long_(len(id_)), id_
        root = id_field if self._has_root else ()
        table_bytes = self._table_bytes + len(id_) + len(eta_) + len(args) + len(kwargs)
        if root:
            table_bytes += len(id_)
        short_id = BYTES[len(id_)], id_
        tail: tuple[bytes, ...]
        if expires:
            expires_ = expires.encode()
            form, size = self._expiring, self._expiring_bytes + len(expires_)
            tail = (*short_id, BYTES[len(expires_)], expires_)
        else:
            form, size, tail = self._plain, self._plain_bytes, short_id
        size += table_bytes + len(id_)
        return method + form % (
            _HEADER_FRAME.pack(2, channel_id, size, 60, 0, len(body)),
            long_(table_bytes),
            *id_field,
            long_(len(eta_)),
            eta_,
            *root,
            long_(len(args)),
            args,
            long_(len(kwargs)),
            kwargs,
            delivery.encode(),
            _DUE.pack(due_ms),
            *tail,
            _body_frames(body, channel_id, frame_max - FRAME_BYTES),
        )

    def headers(self, fields: TaskFields) -> dict[str, Any]:
        """The user's headers of a task, as they would be without the template."""
        headers = self.user_headers | {
            "id": fields.task_id,
            "eta": fields.eta,
            "argsrepr": fields.argsrepr,
            "kwargsrepr": fields.kwargsrepr,
        }
        return headers | ({"root_id": fields.task_id} if self._has_root else {})


class FramedTask:
    """A task on its way through an outbox, whose frames come from a template."""

    __slots__ = ("fields", "frames", "template", "to")

    def __init__(self, template: Template, fields: TaskFields, to: tuple[str, str]) -> None:
        """*to* is the user's own exchange and routing key."""
        self.template = template
        self.fields = fields
        self.to = to
        self.frames = b""

    @property
    def exchange(self) -> str:
        return self.fields.exchange

    @property
    def id(self) -> Hashable:
        return self.fields.exchange, self.fields.routing_key, self.fields.delivery_id.encode()

    @property
    def size_bytes(self) -> int:
        return len(self.frames)

    def encode(self, channel_id: int, frame_max: int) -> None:
        """Make its frames for a channel."""
        self.frames = self.template.frames(self.fields, channel_id=channel_id, frame_max=frame_max)

    def refused(self, reason: str) -> RefusedMessage:
        headers = self.template.headers(self.fields)
        fields = self.fields
        return RefusedMessage(reason, *self.to, headers, fields.body, fields.delivery_id)


@lru_cache(maxsize=4096)
def _method(channel_id: int, exchange: str, routing_key: str) -> bytes:
    """The method frame of a mandatory publish."""
    to, key = short_string(exchange), short_string(routing_key)
    head = _METHOD.pack(1, channel_id, 7 + len(to) + len(key), *spec.Basic.Publish, 0)
    return head + to + key + b"\x01" + FRAME_END


def _with_holes(table: bytes, marks: list[bytes]) -> bytes:
    """*table* as a format that takes one value, or two for a string, where each mark stands.

    ValueError if they do not stand in this order.
    """
    parts = []
    at = 0
    for mark in marks:
        found = table.index(mark, at)
        is_text = mark.startswith(b"S")
        parts.append(table[at:found].replace(b"%", b"%%") + (b"S%b%b" if is_text else b"%b"))
        at = found + len(mark)
    return b"".join(parts) + table[at:].replace(b"%", b"%%")


def _frame(table: bytes, properties: Mapping[str, Any], marks: list[str]) -> tuple[bytes, int]:
    """The header frame and what follows as a format, and its size without what fills it."""
    marked = {**properties, "application_headers": {}, "correlation_id": _ID}
    if len(marks) == 1:
        marked.pop("expiration", None)
    whole = bytes(amqp.Message("", **marked)._serialize_properties())
    at = 2
    for name in ("content_type", "content_encoding"):
        if properties.get(name) is not None:
            at += 1 + len(properties[name].encode())
    size = len(whole) + _HEADER_FRAME.size - FRAME.size - sum(map(len, marks))
    tail = whole[at + LONG.size :].replace(b"%", b"%%")
    for mark in marks:
        tail = tail.replace(short_string(mark), b"%b%b")
    head = whole[:at].replace(b"%", b"%%")
    return b"%b" + head + b"%b" + table + tail + FRAME_END + b"%b", size


def _body_frames(body: bytes, channel_id: int, most: int) -> bytes:
    if 0 < len(body) <= most:
        return b"%b%b\xce" % (FRAME.pack(3, channel_id, len(body)), body)
    chunks = [body[at : at + most] for at in range(0, len(body), most)]
    return b"".join(FRAME.pack(3, channel_id, len(chunk)) + chunk + FRAME_END for chunk in chunks)


def short_string(text: str) -> bytes:
    """*text* behind its length in one byte; IndexError for more than 255 bytes."""
    encoded = text.encode("utf-8", "surrogatepass")
    return BYTES[len(encoded)] + encoded


def long_(number: int) -> bytes:
    """*number* in four bytes."""
    return LONGS[number] if number < 1024 else LONG.pack(number)


def _long_string(text: str) -> bytes:
    return b"S" + LONG.pack(len(text)) + text.encode()
