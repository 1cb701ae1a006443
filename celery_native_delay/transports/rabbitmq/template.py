"""Encode many similar tasks into AMQP frames quickly.

py-amqp needs about 60 µs for the headers of a task. So this module encodes the headers once, and
then inserts only the values that differ (such as id, ETA and arguments).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache
from struct import Struct
from time import time_ns
from typing import Any, NamedTuple

import amqp
from amqp import spec
from amqp.method_framing import frame_writer
from amqp.serialization import dumps

from ...due_time import check_due, milliseconds_up, units_until
from ...errors import RefusedMessage
from ...message import HEADER
from .. import bulk_publisher
from ..bulk_publisher import RandomIds, TaskValues
from .channels import Publication
from .topology import Topology

FRAME = Struct(">BHI")
FRAME_END = b"\xce"

#: Bytes of a frame besides its payload. So a payload has at most frame_max minus these bytes.
FRAME_BYTES = 8

LONG = Struct(">I")

#: An arbitrary channel and frame size, to compare two encodings.
_SOMEWHERE = {"channel_id": 7, "frame_max": 131_072}

#: Encoded numbers: finding a number here is faster than packing it.
LONGS = [LONG.pack(number) for number in range(1024)]
BYTES = [bytes((number,)) for number in range(256)]

_METHOD = Struct(">BHIHHH")
_HEADER_FRAME = Struct(">BHIHHQ")
_DUE = Struct(">q")

_DELIVERY_ID_BYTES = 32

#: Marks for the fields in which tasks differ, in the order of Celery's headers.
_ID, _ETA, _ARGS, _KWARGS = "\0task id\0", "\0eta\0", "\0argsrepr\0", "\0kwargsrepr\0"
_DELIVERY, _DUE_MS = "\0" * _DELIVERY_ID_BYTES, 0x7EED_0DE1_0DE1_0DE1
_EXPIRATION = "\0expiration\0"


class RabbitTaskFields(NamedTuple):
    """The message fields that :class:`Template` inserts for each task."""

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


class RabbitTemplate:
    """Makes AMQP frames fast for tasks that differ only in id, due time and arguments."""

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
        self._form, self._form_bytes = _frame(table, properties)

    def frames(self, fields: RabbitTaskFields, *, channel_id: int, frame_max: int) -> bytes:
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
        expires_ = expires.encode()
        size = self._form_bytes + table_bytes + len(id_) + len(expires_)
        return method + self._form % (
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
            BYTES[len(id_)],
            id_,
            BYTES[len(expires_)],
            expires_,
            _body_frames(body, channel_id, frame_max - FRAME_BYTES),
        )

    def headers(self, fields: RabbitTaskFields) -> dict[str, Any]:
        headers = self.user_headers | {
            "id": fields.task_id,
            "eta": fields.eta,
            "argsrepr": fields.argsrepr,
            "kwargsrepr": fields.kwargsrepr,
        }
        return headers | ({"root_id": fields.task_id} if self._has_root else {})


class FramedTask:
    """A task message that a :class:`Template` encodes into AMQP frames."""

    __slots__ = ("fields", "frames", "template", "to")

    def __init__(
        self, template: RabbitTemplate, fields: RabbitTaskFields, to: tuple[str, str]
    ) -> None:
        self.template = template
        self.fields = fields
        #: The exchange and routing key that the user gave.
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
        self.frames = self.template.frames(self.fields, channel_id=channel_id, frame_max=frame_max)

    def refused(self, reason: str) -> RefusedMessage:
        headers = self.template.headers(self.fields)
        fields = self.fields
        return RefusedMessage(reason, *self.to, headers, fields.body, fields.delivery_id)


@lru_cache(maxsize=4096)
def _method(channel_id: int, exchange: str, routing_key: str) -> bytes:
    to, key = short_string(exchange), short_string(routing_key)
    head = _METHOD.pack(1, channel_id, 7 + len(to) + len(key), *spec.Basic.Publish, 0)
    return head + to + key + b"\x01" + FRAME_END


def _with_holes(table: bytes, marks: list[bytes]) -> bytes:
    """Turn the encoded *table* into a ``%`` format: placeholders replace the values *marks*."""
    parts = []
    at = 0
    for mark in marks:
        found = table.index(mark, at)
        is_text = mark.startswith(b"S")
        parts.append(table[at:found].replace(b"%", b"%%") + (b"S%b%b" if is_text else b"%b"))
        at = found + len(mark)
    return b"".join(parts) + table[at:].replace(b"%", b"%%")


def _frame(table: bytes, properties: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return a ``%`` format for the header frame, and a part of the frame's payload size.

    The caller adds the sizes of the headers table and of the inserted values.
    """
    marks = {"correlation_id": _ID, "expiration": _EXPIRATION}
    marked = {**properties, "application_headers": {}, **marks}
    whole = bytes(amqp.Message("", **marked)._serialize_properties())
    at = 2
    for name in ("content_type", "content_encoding"):
        if properties.get(name) is not None:
            at += 1 + len(properties[name].encode())
    size = len(whole) + _HEADER_FRAME.size - FRAME.size - sum(map(len, marks.values()))
    tail = whole[at + LONG.size :].replace(b"%", b"%%")
    for mark in marks.values():
        tail = tail.replace(short_string(mark), b"%b%b")
    head = whole[:at].replace(b"%", b"%%")
    return b"%b" + head + b"%b" + table + tail + FRAME_END + b"%b", size


def _body_frames(body: bytes, channel_id: int, most: int) -> bytes:
    if 0 < len(body) <= most:
        return b"%b%b\xce" % (FRAME.pack(3, channel_id, len(body)), body)
    chunks = [body[at : at + most] for at in range(0, len(body), most)]
    return b"".join(FRAME.pack(3, channel_id, len(chunk)) + chunk + FRAME_END for chunk in chunks)


def short_string(text: str) -> bytes:
    """Encode *text* as an AMQP short string (a length byte, then the text)."""
    encoded = text.encode("utf-8", "surrogatepass")
    return BYTES[len(encoded)] + encoded


def long_(number: int) -> bytes:
    return LONGS[number] if number < 1024 else LONG.pack(number)


def _long_string(text: str) -> bytes:
    return b"S" + LONG.pack(len(text)) + text.encode()


class FramedPublication:
    """A message from ``apply_async``, which py-amqp (not a :class:`Template`) encodes."""

    def __init__(self, publication: Publication, to: tuple[str, str]) -> None:
        self.publication = publication
        #: The exchange and routing key that the user gave.
        self.to = to
        self.exchange = publication.exchange
        self.frames = b""

    @property
    def id(self) -> Hashable:
        return self.publication.id

    @property
    def size_bytes(self) -> int:
        return len(self.frames)

    def encode(self, channel_id: int, frame_max: int) -> None:
        self.frames = frames_of(self.publication, channel_id=channel_id, frame_max=frame_max)

    def refused(self, reason: str) -> RefusedMessage:
        return self.publication.refused(reason)


class RabbitTaskTemplate(bulk_publisher.TaskTemplate):
    """Makes task messages with one destination, but with different ids, due times and arguments."""

    def __init__(
        self,
        template: RabbitTemplate,
        to: tuple[str, str],
        delays: Any,
        body: bytes,
    ) -> None:
        super().__init__(body)
        self._template = template
        self._to = to
        self._longest_seconds: float = delays.settings.longest_delay_seconds
        self._topology: Topology = delays.topology
        self._address = self._topology.address(*to)
        #: A cached function: exchange and routing key for a delay in units. Raises DelayTooLong.
        self._entry = lru_cache(maxsize=4096)(self._entry_of)

    @classmethod
    def of(cls, message: FramedPublication, channel: Any) -> RabbitTaskTemplate | None:
        publication = message.publication
        properties = publication.message.properties
        headers = properties.get("application_headers") or {}
        if HEADER not in headers or "BCC" in headers or "expires" in headers[HEADER]:
            return None
        try:
            template, fields = RabbitTemplate(properties), fields_of(publication)
            same = _is_made_by(template, fields, publication)
        except ValueError:
            return None
        return cls(template, message.to, channel.delays, fields.body) if same else None

    @staticmethod
    def headers_of(message: FramedPublication) -> Mapping[str, Any]:
        return message.publication.message.properties.get("application_headers") or {}

    def makes(self, message: FramedPublication, values: TaskValues) -> bool:
        try:
            theirs = fields_of(message.publication)
        except ValueError:
            return False
        task_id, eta, argsrepr, kwargsrepr, body = values
        fields = theirs._replace(
            task_id=task_id, eta=eta, argsrepr=argsrepr, kwargsrepr=kwargsrepr, body=body
        )
        is_same = _is_made_by(self._template, fields, message.publication)
        return is_same and message.to == self._to

    def another(
        self, channel: Any, ids: RandomIds, due_us: int, values: TaskValues
    ) -> FramedTask | None:
        topology = self._topology
        now_us = time_ns() // 1000
        units = units_until(due_us, now_us=now_us, resolution_ms=topology.resolution_ms)
        if not units:
            return None
        exchange, key = self._entry(units)  # or DelayTooLong
        expiration = str(topology.first_ttl_ms(units, remaining_us=due_us - now_us))
        fields = RabbitTaskFields(
            exchange, key, *values, ids.hex(), milliseconds_up(due_us), expiration
        )
        return FramedTask(self._template, fields, self._to)

    def _entry_of(self, units: int) -> tuple[str, str]:
        topology = self._topology
        delay_us, longest_seconds = units * topology.resolution_ms * 1000, self._longest_seconds
        check_due(delay_us, now_us=0, longest_delay_seconds=longest_seconds)
        return topology.entry_exchange(units), topology.routing_key(units, self._address)


def _is_made_by(
    template: RabbitTemplate, fields: RabbitTaskFields, publication: Publication
) -> bool:
    return template.frames(fields, **_SOMEWHERE) == frames_of(publication, **_SOMEWHERE)


def fields_of(publication: Publication) -> RabbitTaskFields:
    """Read the :class:`TaskFields` of a message; raise ValueError if a field is missing."""
    message = publication.message
    headers = message.properties["application_headers"]
    body = message.body
    try:
        return RabbitTaskFields(
            publication.exchange,
            publication.routing_key,
            headers["id"],
            headers["eta"],
            headers["argsrepr"],
            headers["kwargsrepr"],
            body.encode() if isinstance(body, str) else body,
            headers[HEADER]["id"],
            headers[HEADER]["due"],
            message.properties["expiration"],
        )
    except KeyError as exc:
        raise ValueError(f"expected a delayed Celery task with {exc}") from exc


class _Written:
    """A fake connection that keeps the bytes of py-amqp's frame writer."""

    def __init__(self, frame_max: int) -> None:
        self.frame_max = frame_max
        self.bytes_sent = 0
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))


def frames_of(publication: Publication, *, channel_id: int, frame_max: int) -> bytes:
    found = _Written(frame_max)
    write = frame_writer(found, found)
    exchange, key, mandatory = publication[1:]
    args = dumps("Bssbb", (0, exchange, key, mandatory, False))
    write(1, channel_id, spec.Basic.Publish, args, publication.message)
    return b"".join(found.written)
