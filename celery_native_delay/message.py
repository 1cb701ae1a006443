"""Reads and writes this package's header of a delayed message.

Increase VERSION when the header changes, because messages stay in brokers for years.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .due_time import due_us, milliseconds_up
from .errors import InvalidDueTime
from .texts import is_text

#: The header of a task that runs a single time: True, or the id of the execution that claimed it.
ONCE = "native_delay_once"

#: The header that this package adds to each delayed message.
HEADER = "native_delay"

#: The header with the tenant of a task on SQS: the key of its rate, or its declared key.
TENANT = "native_delay_tenant"

VERSION = 1

_REQUIRED = {"id", "due", "exchange", "rk"}

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "id": str,
    "due": int,
    "eta": (int, type(None)),
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
    """Return True if this package's message header is valid and has the current VERSION."""
    if not isinstance(header, dict) or header.get("v") != VERSION:
        return False
    has_types = all(isinstance(value, _TYPES.get(name, object)) for name, value in header.items())
    return has_types and 0 <= header.get("due", -1) <= _LATEST_MS


class Delayed(NamedTuple):
    """The header of a delayed message: original exchange, routing key and due time.

    Copies of a message in several queues have the same *delivery_id*. A due message goes to
    *queue*; if *queue* is None, the exchange routes the message. *due_us* and *expires_ms* are
    times since the epoch. The message expires at *expires_ms*, computed from the property
    ``expiration``. If *cancelled* is True, a worker revokes the task. If *stored* is True, the
    message waited in a store.
    """

    delivery_id: str
    due_us: int
    exchange: str
    routing_key: str
    queue: str | None = None
    expires_ms: int | None = None
    cancelled: bool = False
    stored: bool = False

    def header(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Return this header as a dict, plus *kept*: message properties to restore later."""
        header: dict[str, Any] = {
            "v": VERSION,
            "id": self.delivery_id,
            "due": milliseconds_up(self.due_us),
            "exchange": self.exchange,
            "rk": self.routing_key,
        }
        if self.stored:
            header[STORED] = True
        if self.queue is not None:
            header["queue"] = self.queue
        return {**header, **kept}

    @classmethod
    def of(cls, header: Any) -> Delayed | None:
        """Parse the header of a delayed message. Returns None for an invalid header."""
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
            bool(header.get(STORED)),
        )


def due_of(headers: Mapping[str, Any] | None) -> int | None:
    """Return the header ``eta`` in microseconds since the epoch, or None without this header.

    If the header is not ISO 8601, raises InvalidDueTime for a Celery task, and returns None for
    another message.
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
    """Return the header ``eta`` in milliseconds since the epoch, or None if invalid."""
    try:
        found_us = due_of(headers)
    except InvalidDueTime:
        return None
    return None if found_us is None else milliseconds_up(found_us)


#: Field of our header: True if the message waited in a store.
STORED = "stored"

#: Fields of our header: True for a cancelled task, and the task's ``expires`` before the cancel.
CANCELLED, EXPIRES = "cancelled", "task_expires"

#: The ``expires`` of a cancelled task: a worker without this package announces it as expired.
_LONG_AGO = "2000-01-01T00:00:00+00:00"


def cancel(headers: dict[str, Any], header: dict[str, Any]) -> None:
    """Change *headers* and *header* (this package's header), so that no worker runs the task."""
    header[CANCELLED] = True
    if "expires" in headers:
        header[EXPIRES] = headers["expires"]
    headers["expires"] = _LONG_AGO


def undo_cancel(headers: dict[str, Any], header: Mapping[str, Any]) -> bool:
    """Undo :func:`cancel` in *headers*. Returns False if the task was not cancelled."""
    if not header.get(CANCELLED):
        return False
    if EXPIRES in header:
        headers["expires"] = header[EXPIRES]
    else:
        headers.pop("expires", None)
    return True
