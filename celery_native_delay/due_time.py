"""Converts countdowns and ETAs to due times in microseconds since the epoch.

Due times are integers, because a rounded float could run a task too early.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

from .durations import duration
from .errors import DelayTooLong, InvalidDueTime

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

#: A thousand years. The transport checks the longest delay when the message is published.
LONGEST_COUNTDOWN_SECONDS = 1000 * 365.25 * 86400


def due_us(eta: datetime | str) -> int:
    """Convert an ETA (a datetime or ISO 8601 text) to microseconds since the epoch.

    An ETA without a time zone is in UTC. Raises InvalidDueTime if *eta* is neither a datetime nor
    a text in ISO 8601.
    """
    if isinstance(eta, str):
        try:
            eta = datetime.fromisoformat(eta)
        except ValueError as exc:
            raise InvalidDueTime(
                f"expected an ETA in ISO 8601 such as 2026-11-20T09:30:00+00:00, got {eta!r}"
            ) from exc
    if not isinstance(eta, datetime):
        raise InvalidDueTime(f"expected an ETA as datetime or ISO 8601 text, got {eta!r}")
    if eta.tzinfo is None:
        eta = eta.replace(tzinfo=UTC)
    return (eta - _EPOCH) // _MICROSECOND


def due_us_or_none(eta: Any) -> int | None:
    try:
        return due_us(eta) if eta else None
    except InvalidDueTime:
        return None


def eta_of(due_us: int) -> str:
    """Convert microseconds since the epoch to an ETA in ISO 8601."""
    return (_EPOCH + due_us * _MICROSECOND).isoformat()


def told(due_us: int) -> str:
    """Convert microseconds since the epoch to ISO 8601 with milliseconds, for people."""
    return (_EPOCH + due_us * _MICROSECOND).isoformat(timespec="milliseconds")


def milliseconds_up(microseconds: int) -> int:
    """Convert microseconds to milliseconds, rounded up, so that no task runs too early."""
    return -(-microseconds // 1000)


def units_until(due_us: int, *, now_us: int, resolution_ms: int) -> int:
    """Return the number of *resolution_ms* periods until *due_us*, rounded up; 0 if in the past."""
    return max(0, -((now_us - due_us) // (resolution_ms * 1000)))


def check_due(due_us: int, *, now_us: int, longest_delay_seconds: float) -> None:
    """Raise DelayTooLong if the time until *due_us* exceeds the longest allowed delay."""
    if due_us - now_us > longest_delay_seconds * 1_000_000:
        raise DelayTooLong(
            _too_long(milliseconds_up(due_us - now_us) / 1000, longest_delay_seconds)
        )


def check_countdown(countdown: object, *, longest_delay_seconds: float) -> None:
    """Raise an error if a countdown is infinite, NaN, or too long."""
    if not isinstance(countdown, int | float):
        return  # Celery itself raises an error
    if not math.isfinite(countdown):
        raise InvalidDueTime(
            f"expected a countdown of 0 to {duration(longest_delay_seconds)}, got {countdown!r}"
        )
    if countdown > longest_delay_seconds:
        raise DelayTooLong(_too_long(countdown, longest_delay_seconds))


def _too_long(delay_seconds: float, longest_delay_seconds: float) -> str:
    return (
        f"a delay of {duration(delay_seconds, exact=True)} exceeds the longest delay of "
        f"{duration(longest_delay_seconds, exact=True)}: let celery beat send the task when it is "
        f"nearer"
    )
