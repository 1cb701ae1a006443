"""Add this package's header to delayed messages, or remove the header. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kombu.utils.json import dumps

from ...due_time import eta_of
from ...message import HEADER, STORED, VERSION, Delayed, cancel, due_ms_of, is_own, undo_cancel
from ...texts import is_text, storable


def wrapped(
    message: Mapping[str, Any],
    *,
    due_ms: int,
    cancelled: bool = False,
    delivery_id: str | None = None,
) -> dict[str, Any]:
    """Return a copy of kombu's *message* with this package's header."""
    headers = dict(message.get("headers") or {})
    header: dict[str, Any] = {"v": VERSION, "due": due_ms}
    if delivery_id is not None:  # needed if the broker may change the delivery tag
        header["id"] = delivery_id
    if "eta" in headers and due_ms_of(headers) != due_ms:
        header["eta"] = due_ms_of(headers)
    if cancelled:
        cancel(headers, header)
    headers[HEADER] = header
    return {**message, "headers": headers}


def due_then(message: Mapping[str, Any], due_us: int) -> dict[str, Any]:
    """Return a copy of kombu's *message* with a new ETA."""
    return {**message, "headers": {**(message.get("headers") or {}), "eta": eta_of(due_us)}}


def id_of(message: Mapping[str, Any]) -> str:
    """Return the message's task id, or else the correlation id or delivery tag."""
    headers, properties = message.get("headers") or {}, message["properties"]
    found = headers.get("id") or properties.get("correlation_id") or properties["delivery_tag"]
    return storable(str(found))


def encoded(message: Mapping[str, Any]) -> str:
    """Encode *message* as JSON without spaces, to save about 10% of the size."""
    text: str = dumps(message, separators=(",", ":"))
    return text


def delivery_id_of(header: Mapping[str, Any], properties: Mapping[str, Any]) -> str:
    """Return the delivery id in this package's *header*, or else the delivery tag."""
    return str(header.get("id") or properties.get("delivery_tag"))


def unwrapped(
    headers: Mapping[str, Any] | None, properties: Mapping[str, Any]
) -> tuple[dict[str, Any], Delayed | None]:
    """Return *headers* without this package's header, and this header, parsed.

    The parsed header is None if the header is missing or invalid. It is also None if a worker
    without this package copied the header from a task into the task's retry.
    """
    opened = dict(headers or {})
    header = opened.pop(HEADER, None)
    if not is_own(header):
        return opened, None
    # A worker without this package copies our header into a retry, which did not wait.
    if "eta" in opened and header.get("eta", header.get("due")) != due_ms_of(opened):
        return opened, None
    delivery_id = delivery_id_of(header, properties)
    if not is_text(delivery_id):
        return opened, None
    info = properties.get("delivery_info") or {}
    delayed = Delayed(
        delivery_id=delivery_id,
        due_us=header["due"] * 1000,
        exchange=info.get("exchange") or "",
        routing_key=info.get("routing_key") or "",
        cancelled=undo_cancel(opened, header),
        stored=bool(header.get(STORED)),
    )
    return opened, delayed
