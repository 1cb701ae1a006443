"""Removes the dead-letter headers of delay queues from received frames, before py-amqp parses them.

A delayed message has passed about three queues, and RabbitMQ has added a table for each. py-amqp
would take a tenth of a worker's time for a task to parse what :func:`~.wrapping.unwrap` removes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from struct import error, pack, unpack_from
from typing import Any

from amqp.method_framing import frame_handler

from .topology import is_delay_name
from .wrapping import DEATH_HEADERS

#: The type of a frame with a content header: AMQP 0-9-1, section 4.2.6.1. The bits of its flags.
_CONTENT_HEADER = 2
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS = 0x8000, 0x4000, 0x2000
_FLAGS_AT = 12

#: The number of bytes of a value in a table, by its type; other types begin with their length.
_SIZES = dict(zip(b"VtbBUusIifDLldT", (0, 1, 1, 1, 2, 2, 2, 4, 4, 4, 5, 8, 8, 8, 8), strict=True))
_WITH_LENGTH = frozenset(b"SxFA")

_DEATHS = frozenset(name.encode() for name in DEATH_HEADERS)

#: A text that begins with the length of the queue's name, and the name.
_QUEUE = re.compile(rb"\x05queueS..(..)([A-Za-z0-9._-]*)", re.DOTALL)


def handle_frames(connection: Any, on_method: Callable[..., Any]) -> Callable[..., Any]:
    """Return py-amqp's function for received frames, without the deaths of delay queues."""
    handle = frame_handler(connection, on_method)

    def on_frame(frame: tuple[int, int, bytes]) -> Any:
        if frame[0] == _CONTENT_HEADER and b"\x07x-deathA" in frame[2]:
            return handle((_CONTENT_HEADER, frame[1], without_our_deaths(bytes(frame[2]))))
        return handle(frame)

    return on_frame


def without_our_deaths(frame: bytes) -> bytes:
    """Return a content header without its dead-letter headers if all name delay queues.

    Otherwise returns *frame*: the user's own deaths are left to :func:`~.wrapping.unwrap`.
    """
    try:
        (flags,) = unpack_from(">H", frame, _FLAGS_AT)
        if not flags & _HEADERS:
            return frame
        start = _FLAGS_AT + 2
        for flag in (_CONTENT_TYPE, _CONTENT_ENCODING):
            if flags & flag:
                start += 1 + frame[start]
        (size,) = unpack_from(">I", frame, start)
        begin = start + 4
        table = _cut(frame[begin : begin + size])
    except (IndexError, KeyError, error):
        return frame  # py-amqp raises its error
    if table is None:
        return frame
    return b"".join((frame[:start], pack(">I", len(table)), table, frame[begin + size :]))


def _cut(table: bytes) -> bytes | None:
    """Return a table without dead-letter headers, or None if one is not of a delay queue."""
    kept, kept_from, offset = [], 0, 0
    while offset < len(table):
        kind = offset + 1 + table[offset]
        if table[kind] in _WITH_LENGTH:
            end = kind + 5 + int.from_bytes(table[kind + 1 : kind + 5])
        else:
            end = kind + 1 + _SIZES[table[kind]]
        if table.startswith(b"x-", offset + 1) and (name := table[offset + 1 : kind]) in _DEATHS:
            if not _is_ours(name, table[kind + 5 : end]):
                return None
            kept.append(table[kept_from:offset])
            kept_from = end
        offset = end
    kept.append(table[kept_from:])
    return b"".join(kept) if offset == len(table) else None


def _is_ours(name: bytes, value: bytes) -> bool:
    """Return True if the value of a dead-letter header names only delay queues."""
    if name != b"x-death":
        return not name.endswith(b"-queue") or is_delay_name(value.decode(errors="replace"))
    tables, offset = 0, 0
    while offset < len(value):
        if value[offset] != ord("F"):
            return False
        offset += 5 + int.from_bytes(value[offset + 1 : offset + 5])
        tables += 1
    # A text of the user that looks like a queue's name can only make this False.
    found = _QUEUE.findall(value)
    return len(found) == tables and _are_delay_names(*found)


@lru_cache(maxsize=1024)
def _are_delay_names(*found: tuple[bytes, bytes]) -> bool:
    return all(
        len(name) >= int.from_bytes(length)
        and is_delay_name(name[: int.from_bytes(length)].decode())
        for length, name in found
    )
