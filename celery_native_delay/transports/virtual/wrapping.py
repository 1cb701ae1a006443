"""Adding our header to kombu's messages before they wait, and removing it after. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kombu.utils.json import dumps

from ...due_time import eta_of
from ...message import HEADER, VERSION, Delayed, cancel, due_ms_of, is_own, uncover


def wrapped(
    message: Mapping[str, Any],
    *,
    due_ms: int,
    cancelled: bool = False,
    delivery_id: str | None = None,
) -> dict[str, Any]:
    """A copy of kombu's *message* with our header about its wait, which replaces an earlier one.

    A worker does not run a *cancelled* message. *delivery_id* is needed if the broker may change
    the delivery tag.
    """
    headers = dict(message.get("headers") or {})
    header: dict[str, Any] = {"v": VERSION, "due": due_ms}
    if delivery_id is not None:
        header["id"] = delivery_id
    if "eta" in headers and due_ms_of(headers) != due_ms:
        header["eta"] = due_ms_of(headers)
    if cancelled:
        cancel(headers, header)
    headers[HEADER] = header
    return {**message, "headers": headers}


def due_then(message: Mapping[str, Any], due_us: int) -> dict[str, Any]:
    """A copy of kombu's *message* whose ETA is *due_us*."""
    return {**message, "headers": {**(message.get("headers") or {}), "eta": eta_of(due_us)}}


def id_of(message: Mapping[str, Any]) -> str:
    """The id by which people search for *message*: the task id, if it is a task."""
    headers, properties = message.get("headers") or {}, message["properties"]
    found = headers.get("id") or properties.get("correlation_id") or properties["delivery_tag"]
    return str(found)


def encoded(message: Mapping[str, Any]) -> str:
    """*message* as JSON, as kombu encodes it, but without blanks: a tenth shorter."""
    text: str = dumps(message, separators=(",", ":"))
    return text


def delivery_id_of(header: Mapping[str, Any], properties: Mapping[str, Any]) -> str:
    """The delivery id: the one in our *header*, else the delivery tag."""
    return str(header.get("id") or properties.get("delivery_tag"))


def unwrapped(
    headers: Mapping[str, Any] | None, properties: Mapping[str, Any]
) -> tuple[dict[str, Any], Delayed | None]:
    """The headers without ours, and the wait of the message.

    The wait is None for a retry of a plain worker: it copies our header, but its ETA is another and
    it did not wait.
    """
    opened = dict(headers or {})
    header = opened.pop(HEADER, None)
    if not is_own(header):
        return opened, None
    # Task protocol 1 has its ETA in the body; this package adds the header.
    if "eta" in opened and header.get("eta", header.get("due")) != due_ms_of(opened):
        return opened, None
    info = properties.get("delivery_info") or {}
    delayed = Delayed(
        delivery_id=delivery_id_of(header, properties),
        due_us=header["due"] * 1000,
        exchange=info.get("exchange") or "",
        routing_key=info.get("routing_key") or "",
        cancelled=uncover(opened, header),
    )
    return opened, delayed
