"""Decode and change the waiting messages of Redis and databases. This module does no I/O.

A cancelled task becomes due at once. The worker that receives the message does not run the task,
but reports the task as revoked.
"""

from __future__ import annotations

import json

from ...due_time import eta_of, milliseconds_up
from ...errors import CannotDelay
from ...keyed.record import key_and_kind
from ...message import CANCELLED, HEADER
from ...records.waiting import Waiting
from .wrapping import delivery_id_of, encoded, unwrapped, wrapped


def waiting_of(envelope: str | bytes, *, queue: str, due_us: int | None) -> Waiting | None:
    """Decode a waiting task from kombu's JSON *envelope*; return None for cancelled tasks.

    If *due_us* is None or 0, the due time is read from this package's header.
    """
    message = json.loads(envelope)
    headers, properties = message.get("headers") or {}, message["properties"]
    header = headers.get(HEADER) or {}
    if header.get(CANCELLED):
        return None
    info = properties.get("delivery_info") or {}
    opened, _ = unwrapped(headers, properties)
    key, kind = key_and_kind(opened)
    return Waiting.of(
        opened,
        properties,
        queue=queue,
        exchange=info.get("exchange") or "",
        routing_key=info.get("routing_key") or "",
        due_us=due_us or header.get("due", 0) * 1000,
        delivery_id=delivery_id_of(header, properties),
        key=key,
        kind=kind,
    )


def changed(envelope: str | bytes, due_us: int, *, cancelled: bool) -> str | None:
    """Copy a waiting message with a new ETA; mark the copy as cancelled if *cancelled* is True.

    Only tasks of protocol 2 can be changed. For any other message, the function returns None if
    *cancelled* is True (the caller deletes the message), and raises CannotDelay if it is False.
    """
    message = json.loads(envelope)
    headers = dict(message.get("headers") or {})
    if "task" not in headers:
        if cancelled:  # its consumer does not know the mark, and there is no result
            return None
        raise CannotDelay(
            "expected a task of protocol 2, whose ETA is in its headers: only such can be "
            "rescheduled, others can be cancelled"
        )
    headers["eta"] = eta_of(due_us)
    moved = {**message, "headers": headers}
    return encoded(wrapped(moved, due_ms=milliseconds_up(due_us), cancelled=cancelled))
