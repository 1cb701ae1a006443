"""The header that a message carries through its wait, and the ETA that it waits for.

Rule: what the header holds is decided here alone; a change in it is a new VERSION, because messages
in brokers carry it for years.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .due_time import due_us, milliseconds_up
from .errors import InvalidDueTime
from .texts import is_text

#: The one header we add: what the worker must see again, and when.
HEADER = "native_delay"

VERSION = 1

_REQUIRED = {"id", "due", "exchange", "rk"}

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "id": str,
    "due": int,
    "exchange": str,
    "rk": str,
    "queue": str,
    "expires": int,
    "expiration": (str, int),
    "priority": int,
    "user_id": str,
    "deaths": dict,
}

#: The end of the year 9999 in milliseconds since the epoch: no ETA is later.
_LATEST_MS = 253_402_300_800_000


def is_own(header: Any) -> bool:
    """True for a header of this version whose fields have their types.

    A producer may send any value under this name.
    """
    if not isinstance(header, dict) or header.get("v") != VERSION:
        return False
    has_types = all(isinstance(value, _TYPES.get(name, object)) for name, value in header.items())
    return has_types and 0 <= header.get("due", -1) <= _LATEST_MS


class Delayed(NamedTuple):
    """The wait of one message, as its header tells of it.

    *delivery_id* is equal only for copies of one delivery. *exchange* and *routing_key* are what it
    was published with, and is seen with again; *queue* is the only one it is for, None for all that
    these lead to. *due_us* and *expires_ms*, the end of its own ``expiration``, count from the
    epoch. One that was *cancelled* comes to be announced, not to run.
    """

    delivery_id: str
    due_us: int
    exchange: str
    routing_key: str
    queue: str | None = None
    expires_ms: int | None = None
    cancelled: bool = False

    def header(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Our header for it; *kept* is what is taken from the message until it has waited."""
        header: dict[str, Any] = {
            "v": VERSION,
            "id": self.delivery_id,
            "due": milliseconds_up(self.due_us),
            "exchange": self.exchange,
            "rk": self.routing_key,
        }
        if self.queue is not None:
            header["queue"] = self.queue
        return {**header, **kept}

    @classmethod
    def of(cls, header: Any) -> Delayed | None:
        """The wait that a header of :meth:`header` tells of; None for anything else."""
        if not is_own(header) or not header.keys() >= _REQUIRED or not is_text(header["id"]):
            return None
        return cls(
            header["id"],
            header["due"] * 1000,
            header["exchange"],
            header["rk"],
            header.get("queue"),
            header.get("expires"),
            bool(header.get(CANCELLED)),
        )


def due_of(headers: Mapping[str, Any] | None) -> int | None:
    """The due time in a message's ``eta`` header, microseconds since the epoch, or None.

    InvalidDueTime: a Celery task's ETA is not ISO 8601. In other messages it means nothing to us.
    """
    eta = headers.get("eta") if headers else None
    if not eta:
        return None
    try:
        return due_us(eta)
    except InvalidDueTime:
        if headers and "task" in headers:
            raise
        return None


def due_ms_of(headers: Mapping[str, Any]) -> int | None:
    """The due time in milliseconds, as our header has it; None also where :func:`due_of` raises."""
    try:
        found_us = due_of(headers)
    except InvalidDueTime:
        return None
    return None if found_us is None else milliseconds_up(found_us)


#: Under these two our header keeps that its task was cancelled, and the ``expires`` it had.
CANCELLED, EXPIRES = "cancelled", "task_expires"

#: Long ago: a worker that knows nothing of us announces a cancelled task as expired.
_LONG_AGO = "2000-01-01T00:00:00+00:00"


def cancel(headers: dict[str, Any], header: dict[str, Any]) -> None:
    """Mark a task's *headers*, and our *header* among them: its receiver must not run it."""
    header[CANCELLED] = True
    if "expires" in headers:
        header[EXPIRES] = headers["expires"]
    headers["expires"] = _LONG_AGO


def uncover(headers: dict[str, Any], header: Mapping[str, Any]) -> bool:
    """True if the task was cancelled; its *headers* then have what :func:`cancel` took."""
    if not header.get(CANCELLED):
        return False
    if EXPIRES in header:
        headers["expires"] = header[EXPIRES]
    else:
        headers.pop("expires", None)
    return True
