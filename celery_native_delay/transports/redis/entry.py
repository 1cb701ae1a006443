"""Encode a waiting message in Redis: its destination, and the message itself. No I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Destination:
    """The destination of a due message: the Redis list whose name is the first of *keys*.

    If *ttl_ms* is given, all *keys* get that TTL, as kombu does for a queue with ``x-expires``. If
    *broadcast* is True, *keys* are pub/sub channels on which the message is published.
    """

    keys: tuple[str, ...]
    ttl_ms: int = 0
    broadcast: bool = False


def entry_of(destination: Destination, envelope: str) -> bytes:
    """Return destination and envelope (kombu's message as JSON) as one value of the Redis hash."""
    return front_of(destination) + envelope.encode()


def front_of(destination: Destination) -> bytes:
    """Return the first part of a stored message, equal for all messages to *destination*.

    The part is ``<kind> <ttl ms> <bytes of each key>``, a newline, and the keys. Lengths are given
    because a key may contain any byte. Lua cuts the entry without parsing kombu's message, because
    cjson would change empty lists and long numbers.
    """
    keys = [key.encode() for key in destination.keys]
    kind = "publish" if destination.broadcast else "push"
    head = " ".join([kind, str(destination.ttl_ms), *(str(len(key)) for key in keys)])
    return b"".join([head.encode(), b"\n", *keys])


def opened_entry(entry: bytes) -> tuple[Destination, bytes]:
    """Split an entry that :func:`entry_of` made into destination and kombu's message."""
    head, _, rest = entry.partition(b"\n")
    kind, ttl_ms, *lengths = head.decode().split(" ")
    keys = []
    for length in map(int, lengths):
        keys.append(rest[:length].decode())
        rest = rest[length:]
    return Destination(tuple(keys), int(ttl_ms), kind == "publish"), rest
