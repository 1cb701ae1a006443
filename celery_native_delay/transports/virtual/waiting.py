"""Reading and changing waiting messages on Redis and in stores. Pure.

A cancelled task becomes due at once, with a mark. The worker that receives it does not run it, but
tells the result backend, the chord and the monitors that it is revoked.
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
    """The task of a message that waits for *queue*; *due_us* is None for a parked message.

    None for a cancelled task, whose message is on its way to a worker.
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
    """The envelope that replaces this one; None if the message is to be deleted.

    Raises CannotDelay if it is no task that can be rescheduled.
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
