"""The headers of a received message, read from its frame; the record of its wait is left out.

RabbitMQ adds an ``x-death`` entry for every level that a message waited in, which an installed
consumer never sees (:func:`.envelope.unseal`) and py-amqp decodes in about 8 µs each. The rest is
read here too, in half the time: a matured task has to be as cheap to receive as any other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from amqp.method_framing import frame_handler

from ...core.topology import is_delay_name
from .encoded import keep_bytes
from .envelope import DEATH_HEADERS

_HEADER_FRAME = 2

#: Class id, weight, body size; then 16 bits that say which properties follow.
#: https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 4.2.6.1
_FLAGS_AT = 12
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS = 0x8000, 0x4000, 0x2000

_SHORT = struct.Struct(">H").unpack_from
_LONG = struct.Struct(">I").unpack_from
_SIGNED_LONG = struct.Struct(">i").unpack_from
_LONG_LONG = struct.Struct(">q").unpack_from
_DOUBLE = struct.Struct(">d").unpack_from

_NO_HEADERS = bytes(4)
_DEATHS = frozenset(DEATH_HEADERS)
_NONE: frozenset[str] = frozenset()

#: What may come before the name of an entry's queue: 3.10 sorts the fields, 4.x does not
#: (rabbit_dead_letter.erl, mc_amqpl.erl).
_BEFORE_QUEUE = (b"\x05count", b"\x06reason", b"\x08exchange", b"\x13original-expiration")
_QUEUE = b"\x05queueS"


def handler_of_read_headers(connection: Any, callback: Callable[..., Any]) -> Any:
    """A frame handler for ``amqp.Connection(frame_handler=…)``."""
    #: By channel, until the body is complete.
    read: dict[int, dict[str, Any]] = {}

    def on_method(channel_id: int, method: Any, arguments: bytes, content: Any) -> Any:
        if content is not None:
            keep_bytes(content)
            if channel_id in read:
                content.properties["application_headers"] = read.pop(channel_id)
        return callback(channel_id, method, arguments, content)

    on_frame = frame_handler(connection, on_method)

    def on_frame_read(frame: tuple[int, int, bytes]) -> Any:
        kind, channel_id, payload = frame
        if kind == _HEADER_FRAME:
            payload, headers = read_headers(payload)
            if headers is None:
                read.pop(channel_id, None)
            else:
                read[channel_id] = headers
                frame = kind, channel_id, payload
        return on_frame(frame)

    return on_frame_read


def read_headers(header: bytes) -> tuple[bytes, dict[str, Any] | None]:
    """The payload of a content header frame with an empty table of headers, and what was in it.

    Without the death headers, if all deaths are ours. The payload as it was, and None, where others
    have an entry, where there are no headers, and where anything is not as RabbitMQ writes it.
    """
    try:
        return _read(header)
    except (LookupError, ValueError, struct.error):
        return header, None


def _read(header: bytes) -> tuple[bytes, dict[str, Any] | None]:
    (flags,) = _SHORT(header, _FLAGS_AT)
    table_at = _FLAGS_AT + 2
    for flag in (_CONTENT_TYPE, _CONTENT_ENCODING):
        if flags & flag:
            table_at += 1 + header[table_at]
    if not flags & _HEADERS:
        return header, None
    end = table_at + 4 + _LONG(header, table_at)[0]
    if end > len(header):
        raise ValueError("a table that is cut off")
    headers = _table(header, table_at + 4, end, _DEATHS)
    return b"".join((header[:table_at], _NO_HEADERS, header[end:])), headers


def _table(header: bytes, at: int, end: int, deaths: frozenset[str] = _NONE) -> dict[str, Any]:
    """A table's fields without *deaths*."""
    table: dict[str, Any] = {}
    while at < end:
        value_at = at + 1 + header[at]
        name = header[at + 1 : value_at].decode()
        if name in deaths:
            at = _behind_death(header, name, value_at)
        elif header[value_at] == 0x53:  # S, as most
            text_at = value_at + 5
            at = text_at + _LONG(header, value_at + 1)[0]
            table[name] = header[text_at:at].decode()
        else:
            table[name], at = _value(header, value_at)
    if at != end:
        raise ValueError("a value that is longer than its table")
    return table


def _value(header: bytes, at: int) -> tuple[Any, int]:
    """The value whose type is at *at*, and where it ends.

    Types by https://www.rabbitmq.com/amqp-0-9-1-errata#section_3. Those that releases of py-amqp
    understand differently, or that tasks do not have, are left to it.
    """
    kind = header[at]
    at += 1
    if kind == 0x53:  # S
        end = at + 4 + _LONG(header, at)[0]
        return header[at + 4 : end].decode(), end
    if kind == 0x49:  # I
        return _SIGNED_LONG(header, at)[0], at + 4
    if kind == 0x56:  # V
        return None, at
    if kind == 0x74:  # t
        return bool(header[at]), at + 1
    if kind == 0x41:  # A
        end = at + 4 + _LONG(header, at)[0]
        at += 4
        values = []
        while at < end:
            value, at = _value(header, at)
            values.append(value)
        if at != end:
            raise ValueError("a value that is longer than its array")
        return values, end
    if kind == 0x46:  # F
        end = at + 4 + _LONG(header, at)[0]
        return _table(header, at + 4, end), end
    if kind == 0x64:  # d
        return _DOUBLE(header, at)[0], at + 8
    if kind == 0x6C and header[at] < 0x80:  # l, not negative
        return _LONG_LONG(header, at)[0], at + 8
    raise ValueError(f"type {kind:#04x}")


def _behind_death(header: bytes, name: str, at: int) -> int:
    """Where a death header's value ends, its type being at *at*.

    Raises:
        ValueError: not all deaths are ours, or it is not what RabbitMQ writes.
    """
    end = at + 5 + int(_LONG(header, at + 1)[0])
    if name == "x-death":
        if header[at] != 0x41:  # A
            raise ValueError(name)
        at += 5
        while at < end:
            at = _behind_own(header, at)
        if at != end:
            raise ValueError("an entry that is longer than its array")
    elif header[at] != 0x53:  # S
        raise ValueError(name)
    return end


def _behind_own(header: bytes, at: int) -> int:
    """Where one of our entries of ``x-death`` ends, its type being at *at*; raises likewise."""
    end = at + 5 + int(_LONG(header, at + 1)[0])
    field_at = at + 5
    while header.startswith(_BEFORE_QUEUE, field_at):
        field_at = _value(header, field_at + 1 + header[field_at])[1]
    if header[at] != 0x46 or not header.startswith(_QUEUE, field_at):  # F
        raise ValueError("no queue")
    if not is_delay_name(_value(header, field_at + len(_QUEUE) - 1)[0]):
        raise ValueError("not in one of our queues")
    return end
