"""Encode and decode the waiting messages in Redis. This module does no I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Destination:
    """The Redis list or the pub/sub channels that receive a due message."""

    keys: tuple[str, ...]
    #: A TTL for all keys, as in kombu for queues with ``x-expires``. The first key is the list.
    ttl_ms: int = 0
    broadcast: bool = False


def entry_of(destination: Destination, envelope: str) -> str:
    """Encode a destination and kombu's JSON message as one Redis hash value."""
    return front_of(destination).decode() + envelope


def front_of(destination: Destination) -> bytes:
    """Encode *destination*, the Redis keys to which a due message is delivered.

    For two keys: ``push <ttl ms> <length of key 1> <length of key 2>\\n<key 1><key 2>``. For a
    fanout exchange, the first word is ``publish``. A TTL of 0 means that the keys do not expire.
    """
    # A key may contain any byte, so its length is given. The Lua scripts do not parse kombu's JSON,
    # because cjson changes empty lists and long numbers.
    keys = [key.encode() for key in destination.keys]
    kind = "publish" if destination.broadcast else "push"
    head = " ".join([kind, str(destination.ttl_ms), *(str(len(key)) for key in keys)])
    return b"".join([head.encode(), b"\n", *keys])


def opened_entry(entry: bytes) -> tuple[Destination, bytes]:
    """Decode a Redis hash value into the destination and kombu's message."""
    head, _, rest = entry.partition(b"\n")
    kind, ttl_ms, *lengths = head.decode().split(" ")
    keys = []
    for length in map(int, lengths):
        keys.append(rest[:length].decode())
        rest = rest[length:]
    return Destination(tuple(keys), int(ttl_ms), kind == "publish"), rest
