"""Encode a waiting message for Redis: its destination and kombu's JSON. No I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Destination:
    """The destination of a due message: the Redis list named by the first of *keys*.

    If *ttl_ms* is given, all keys get that TTL, as in kombu for queues with ``x-expires``. If
    *broadcast* is True, the keys are pub/sub channels.
    """

    keys: tuple[str, ...]
    ttl_ms: int = 0
    broadcast: bool = False


def entry_of(destination: Destination, envelope: str) -> bytes:
    """Return *destination* and *envelope* (kombu's JSON) as one value for a Redis hash."""
    return front_of(destination) + envelope.encode()


def front_of(destination: Destination) -> bytes:
    """Return the encoded *destination*, the first part of a stored message.

    The form is ``<kind> <ttl ms> <bytes of each key>``, a newline, and the keys. A key may contain
    any byte, so its length is given. The Lua scripts do not parse kombu's JSON, because cjson
    changes empty lists and long numbers.
    """
    keys = [key.encode() for key in destination.keys]
    kind = "publish" if destination.broadcast else "push"
    head = " ".join([kind, str(destination.ttl_ms), *(str(len(key)) for key in keys)])
    return b"".join([head.encode(), b"\n", *keys])


def opened_entry(entry: bytes) -> tuple[Destination, bytes]:
    """Decode a stored message into its destination and kombu's message."""
    head, _, rest = entry.partition(b"\n")
    kind, ttl_ms, *lengths = head.decode().split(" ")
    keys = []
    for length in map(int, lengths):
        keys.append(rest[:length].decode())
        rest = rest[length:]
    return Destination(tuple(keys), int(ttl_ms), kind == "publish"), rest
