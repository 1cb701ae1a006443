"""Entries of messages: where each goes, and what kombu pushes there. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Destination:
    """The place that a message goes to when it is due: the first of *keys* is a list to push to.

    With *ttl_ms* all of *keys* expire that much later, as kombu has it for a queue with
    ``x-expires``. With *broadcast* they are channels to publish on instead.
    """

    keys: tuple[str, ...]
    ttl_ms: int = 0
    broadcast: bool = False


def entry_of(destination: Destination, envelope: str) -> bytes:
    """Destination and envelope as one value of the hash."""
    return front_of(destination) + envelope.encode()


def front_of(destination: Destination) -> bytes:
    """The beginning of the entries of all messages for *destination*.

    ``<kind> <ttl ms> <bytes of each key>``, a newline, the keys; then comes the envelope. Lengths,
    because a key may hold any byte; in front, because Lua must cut without reading the envelope:
    what cjson reads and writes again has lost its empty lists and long numbers.
    """
    keys = [key.encode() for key in destination.keys]
    kind = "publish" if destination.broadcast else "push"
    head = " ".join([kind, str(destination.ttl_ms), *(str(len(key)) for key in keys)])
    return b"".join([head.encode(), b"\n", *keys])


def opened_entry(entry: bytes) -> tuple[Destination, bytes]:
    """The opposite of :func:`entry_of`."""
    head, _, rest = entry.partition(b"\n")
    kind, ttl_ms, *lengths = head.decode().split(" ")
    keys = []
    for length in map(int, lengths):
        keys.append(rest[:length].decode())
        rest = rest[length:]
    return Destination(tuple(keys), int(ttl_ms), kind == "publish"), rest
