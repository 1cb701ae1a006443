"""What every transport's messages have in common: the ETA they carry, and the trace of a wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .due_time import due_us, milliseconds_up
from .errors import InvalidDueTime

#: The one header we add: what the worker must see again, and when.
HEADER = "native_delay"


class Replaces(NamedTuple):
    """The delivery that a copy is to take the place of, and when it was made, in ms since 1970."""

    delivery_id: str
    made_ms: int


class Delayed(NamedTuple):
    """The wait of one message, as its header tells of it.

    *delivery_id* is equal only for copies of one delivery. *exchange* and *routing_key* are what it
    was published with, and is seen with again; *queue* is the only one it is for, None for all that
    these lead to. *due_us* and *expires_ms*, the end of its own ``expiration``, count from the
    epoch. One that was *cancelled* comes to be announced, not to run. One that *replaces* another
    counts only if a ledger in streams says so.
    """

    delivery_id: str
    due_us: int
    exchange: str
    routing_key: str
    queue: str | None = None
    expires_ms: int | None = None
    cancelled: bool = False
    replaces: Replaces | None = None


def due_of(headers: Mapping[str, Any] | None) -> int | None:
    """The due time in a message's ``eta`` header, microseconds since the epoch, or None.

    Raises:
        InvalidDueTime: a Celery task with an ETA that is not ISO 8601. In other messages an
            ``eta`` that is no date means nothing to us.
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
    """The same in milliseconds, as a trace has it; None also for an ETA that is not ISO 8601."""
    try:
        found_us = due_of(headers)
    except InvalidDueTime:
        return None
    return None if found_us is None else milliseconds_up(found_us)


#: Under these two a trace keeps that its task was cancelled, and the ``expires`` it had.
CANCELLED, EXPIRES = "cancelled", "task_expires"

#: Long ago: a worker that knows nothing of us announces a cancelled task as expired.
_LONG_AGO = "2000-01-01T00:00:00+00:00"


def cancel(headers: dict[str, Any], trace: dict[str, Any]) -> None:
    """Mark a task's *headers* and *trace*: whoever receives it must not run it."""
    trace[CANCELLED] = True
    if "expires" in headers:
        trace[EXPIRES] = headers["expires"]
    headers["expires"] = _LONG_AGO


def uncover(headers: dict[str, Any], trace: Mapping[str, Any]) -> bool:
    """Whether the task was cancelled; its *headers* then have what :func:`cancel` took."""
    if not trace.get(CANCELLED):
        return False
    if EXPIRES in trace:
        headers["expires"] = trace[EXPIRES]
    else:
        headers.pop("expires", None)
    return True
