"""The header that tells of a message's wait: put on before it, taken off after it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kombu.utils.json import dumps

from ...message import HEADER, Delayed, cancel, due_ms_of, uncover

VERSION = 1


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


def encoded(message: Mapping[str, Any]) -> str:
    """As kombu would send it, but for the blanks: a tenth less to keep, and to read in a search."""
    text: str = dumps(message, separators=(",", ":"))
    return text


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
        due_us=trace["due"] * 1000,
        exchange=info.get("exchange") or "",
        routing_key=info.get("routing_key") or "",
        cancelled=uncover(opened, trace),
    )
    return opened, delayed
