"""Our header on kombu's messages: put on before a wait, taken off after it. Pure."""

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
    """A copy of kombu's *message* that tells of its wait; what it told of an earlier one is gone.

    If it was *cancelled*, no worker may run it. Its delivery tag may change on the way: then it
    needs a *delivery_id*.
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
    """The id under which people look for *message*: a task's, if it is one."""
    headers, properties = message.get("headers") or {}, message["properties"]
    found = headers.get("id") or properties.get("correlation_id") or properties["delivery_tag"]
    return str(found)


def encoded(message: Mapping[str, Any]) -> str:
    """*message* as kombu would send it, but for the blanks: a tenth less to keep and to search."""
    text: str = dumps(message, separators=(",", ":"))
    return text


def delivery_id_of(header: Mapping[str, Any], properties: Mapping[str, Any]) -> str:
    """The id of a delivery: that in our *header*, else its delivery tag."""
    return str(header.get("id") or properties.get("delivery_tag"))


def unwrapped(
    headers: Mapping[str, Any] | None, properties: Mapping[str, Any]
) -> tuple[dict[str, Any], Delayed | None]:
    """Headers as of the undelayed message, and its wait.

    No wait for a header that was taken along: a plain worker sends unknown headers again with a
    retry, whose ETA is another one and which did not wait.
    """
    opened = dict(headers or {})
    header = opened.pop(HEADER, None)
    if not is_own(header):
        return opened, None
    # Task protocol 1 has its ETA in the body; only we give it the header.
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
