"""What is stored of a message, and what a consumer sees of its wait. Pure: data in, data out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.delayed import HEADER, Delayed, cancel, due_ms_of, uncover

VERSION = 1


@dataclass(frozen=True)
class Destination:
    """Where a message goes when it is due: the first of *keys* is a list to push to.

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
    """What the entries of all messages for *destination* begin with.

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


def sealed(message: Mapping[str, Any], *, due_ms: int, cancelled: bool = False) -> dict[str, Any]:
    """A copy of kombu's *message* that tells of its wait; what it told of an earlier one is gone.

    Args:
        due_ms: milliseconds since the epoch.
        cancelled: whoever receives it must not run it.
    """
    headers = dict(message.get("headers") or {})
    trace: dict[str, Any] = {"v": VERSION, "due": due_ms}
    if cancelled:
        cancel(headers, trace)
    headers[HEADER] = trace
    return {**message, "headers": headers}


def unsealed(
    headers: Mapping[str, Any] | None, properties: Mapping[str, Any]
) -> tuple[dict[str, Any], Delayed | None]:
    """Headers as of the undelayed message, and its wait.

    None for a trace that somebody took along: a plain worker sends unknown headers again with a
    retry, whose ETA is another one and which did not wait.
    """
    opened = dict(headers or {})
    trace = opened.pop(HEADER, None)
    if not isinstance(trace, dict) or trace.get("v") != VERSION:
        return opened, None
    # Task protocol 1 has its ETA in the body; nobody but us gives it the header.
    if "eta" in opened and trace.get("due") != due_ms_of(opened):
        return opened, None
    info = properties.get("delivery_info") or {}
    delayed = Delayed(
        delivery_id=str(properties.get("delivery_tag")),
        due_ms=trace["due"],
        exchange=info.get("exchange") or "",
        routing_key=info.get("routing_key") or "",
        cancelled=uncover(opened, trace),
    )
    return opened, delayed
