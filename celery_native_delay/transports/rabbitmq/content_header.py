"""The broker's record of a message's wait, cut out before py-amqp decodes it.

RabbitMQ adds an ``x-death`` entry for every level that a message waited in. py-amqp decodes one
in about 8 µs, which is most of what a matured task costs a worker more than an immediate one; an
installed consumer never sees them (:func:`.envelope.unseal`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from amqp.method_framing import frame_handler

from ...core.topology import is_delay_name

_HEADER_FRAME = 2

#: Class id, weight, body size; then 16 bits that say which properties follow.
#: https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 4.2.6.1
_FLAGS_AT = 12
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS = 0x8000, 0x4000, 0x2000

_SHORT = struct.Struct(">H")
_LONG = struct.Struct(">I")

_X_DEATH = b"\x07x-deathA"
#: The first text that follows a death's count and reason; nobody's own text comes before it.
_QUEUE = b"\x05queueS"

#: Bytes of a field's value by its type, as RabbitMQ writes them.
#: https://www.rabbitmq.com/amqp-0-9-1-errata#section_3
_SIZES = {
    **dict.fromkeys(b"tbB", 1),
    **dict.fromkeys(b"sUu", 2),
    **dict.fromkeys(b"Iif", 4),
    **dict.fromkeys(b"LldT", 8),
    ord("D"): 5,
    ord("V"): 0,
}
_SIZED_BY_THEMSELVES = frozenset(b"SxFA")


def handler_without_own_deaths(connection: Any, callback: Callable[..., Any]) -> Any:
    """A frame handler for ``amqp.Connection(frame_handler=…)``."""
    on_frame = frame_handler(connection, callback)

    def on_frame_cut(frame: tuple[int, int, bytes]) -> Any:
        if frame[0] == _HEADER_FRAME and _X_DEATH in frame[2]:
            frame = (frame[0], frame[1], without_own_deaths(frame[2]))
        return on_frame(frame)

    return on_frame_cut


def without_own_deaths(header: bytes) -> bytes:
    """The payload of a content header frame without ``x-death`` if all its entries are ours.

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
    size = _long_at(header, table_at)
    at = table_at + 4
    while at < table_at + 4 + size:
        value_at = at + 1 + header[at] + 1
        after = value_at + _value_size(header, value_at)
        if header.startswith(_X_DEATH, at):
            if not _all_ours(header, value_at + 4, after):
                return header
            left = _LONG.pack(size - (after - at))
            return b"".join((header[:table_at], left, header[table_at + 4 : at], header[after:]))
        at = after
    return header


def _value_size(header: bytes, value_at: int) -> int:
    kind = header[value_at - 1]
    if kind in _SIZED_BY_THEMSELVES:
        return 4 + _long_at(header, value_at)
    return _SIZES[kind]


def _all_ours(header: bytes, at: int, end: int) -> bool:
    while at < end:
        after = at + 1 + _value_size(header, at + 1)
        queue_at = header.index(_QUEUE, at, after) + len(_QUEUE)
        name = header[queue_at + 4 : queue_at + 4 + _long_at(header, queue_at)]
        if not is_delay_name(name.decode()):
            return False
        at = after
    return True


def _long_at(header: bytes, at: int) -> int:
    return int(_LONG.unpack_from(header, at)[0])
