"""The entry of a waiting message in Redis: its destination, and the message itself. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Destination:
    """The destination of a message when it is due: the list that is the first of *keys*.

    With *ttl_ms* all *keys* get that TTL, as kombu does for a queue with ``x-expires``. With
    *broadcast* the *keys* are pub/sub channels to publish on.
    """

    keys: tuple[str, ...]
    ttl_ms: int = 0
    broadcast: bool = False


def entry_of(destination: Destination, envelope: str) -> bytes:
    """Destination and envelope as one value for the hash of messages."""
    return front_of(destination) + envelope.encode()


def front_of(destination: Destination) -> bytes:
    """The first part of an entry, which is equal for all messages to *destination*.

    It is ``<kind> <ttl ms> <bytes of each key>``, a newline, and the keys. The envelope follows.
    Lengths are given because a key may contain any byte. Lua cuts the entry without parsing the
    envelope, because cjson would change empty lists and long numbers.
    """
    keys = [key.encode() for key in destination.keys]
    kind = "publish" if destination.broadcast else "push"
    head = " ".join([kind, str(destination.ttl_ms), *(str(len(key)) for key in keys)])
    return b"".join([head.encode(), b"\n", *keys])


def opened_entry(entry: bytes) -> tuple[Destination, bytes]:
    """Split an entry of :func:`entry_of` into destination and envelope."""
    head, _, rest = entry.partition(b"\n")
    kind, ttl_ms, *lengths = head.decode().split(" ")
    keys = []
    for length in map(int, lengths):
        keys.append(rest[:length].decode())
        rest = rest[length:]
    return Destination(tuple(keys), int(ttl_ms), kind == "publish"), rest
