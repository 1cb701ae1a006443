"""The broker's record of a message's wait, cut out before py-amqp decodes it.

RabbitMQ adds an ``x-death`` entry for every level that a message waited in, and py-amqp decodes
one in about 8 µs; an installed consumer never sees them (:func:`.envelope.unseal`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from amqp.method_framing import frame_handler

from ...core.topology import is_delay_name
from .envelope import DEATH_HEADERS

_HEADER_FRAME = 2

#: Class id, weight, body size; then 16 bits that say which properties follow.
#: https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 4.2.6.1
_FLAGS_AT = 12
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS = 0x8000, 0x4000, 0x2000

_SHORT = struct.Struct(">H")
_LONG = struct.Struct(">I")

#: Bytes of a field's value by its type, as RabbitMQ writes them; S, x, F and A begin with theirs.
#: https://www.rabbitmq.com/amqp-0-9-1-errata#section_3
_SIZES = {
    **dict.fromkeys(b"tbB", 1),
    **dict.fromkeys(b"sUu", 2),
    **dict.fromkeys(b"Iif", 4),
    **dict.fromkeys(b"LldT", 8),
    ord("D"): 5,
    ord("V"): 0,
}

_X = ord("x")
_X_DEATH = b"\x07x-death"
_KEYS = tuple(bytes((len(name),)) + name.encode() for name in DEATH_HEADERS)

_QUEUE = b"\x05queueS"
#: What may come before the name of an entry's queue: 3.10 sorts the fields, 4.x does not
#: (rabbit_dead_letter.erl, mc_amqpl.erl).
_BEFORE_QUEUE = (b"\x05count", b"\x06reason", b"\x08exchange", b"\x13original-expiration")


def handler_without_own_deaths(connection: Any, callback: Callable[..., Any]) -> Any:
    """A frame handler for ``amqp.Connection(frame_handler=…)``."""
    on_frame = frame_handler(connection, callback)

    def on_frame_cut(frame: tuple[int, int, bytes]) -> Any:
        if frame[0] == _HEADER_FRAME and _X_DEATH in frame[2]:
            frame = (frame[0], frame[1], without_own_deaths(frame[2]))
        return on_frame(frame)

    return on_frame_cut


def without_own_deaths(header: bytes) -> bytes:
    """The payload of a content header frame without its death headers, if all deaths are ours.

    Unchanged where others have an entry, and where anything is not as RabbitMQ writes it.
    """
    try:
        return _cut(header)
    except (LookupError, ValueError, struct.error):
        return header


def _cut(header: bytes) -> bytes:
    (flags,) = _SHORT.unpack_from(header, _FLAGS_AT)
    table_at = _FLAGS_AT + 2
    for flag in (_CONTENT_TYPE, _CONTENT_ENCODING):
        if flags & flag:
            table_at += 1 + header[table_at]
    if not flags & _HEADERS:
        return header
    (size,) = _LONG.unpack_from(header, table_at)
    at = kept_to = table_at + 4
    end = at + size
    kept = []
    while at < end:
        field_at = at
        value_at = at + header[at] + 2
        at = _behind(header, value_at)
        if header[field_at + 1] == _X and header.startswith(_KEYS, field_at):
            if header.startswith(_X_DEATH, field_at) and not _all_ours(header, value_at, at):
                return header
            kept.append(header[kept_to:field_at])
            kept_to = at
    kept.append(header[kept_to:end])
    table = b"".join(kept)
    return b"".join((header[:table_at], _LONG.pack(len(table)), table, header[end:]))


def _behind(header: bytes, value_at: int) -> int:
    """Where the value that begins at *value_at* ends; its type is in the byte before."""
    size = _SIZES.get(header[value_at - 1])
    if size is None:
        return value_at + 4 + int(_LONG.unpack_from(header, value_at)[0])
    return value_at + size


def _all_ours(header: bytes, at: int, end: int) -> bool:
    if header[at - 1] != ord("A"):
        return False
    at += 4
    while at < end:
        field_at, at = at + 5, _behind(header, at + 1)
        while header.startswith(_BEFORE_QUEUE, field_at):
            field_at = _behind(header, field_at + header[field_at] + 2)
        if not header.startswith(_QUEUE, field_at):
            return False
        name_at = field_at + len(_QUEUE)
        if not is_delay_name(header[name_at + 4 : _behind(header, name_at)].decode()):
            return False
    return True
