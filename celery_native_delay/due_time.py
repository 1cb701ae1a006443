"""Countdowns and ETAs in units of the resolution.

Microseconds since the epoch throughout, because ETAs carry them: with exact integers
``countdown=5`` is exactly five seconds and nothing is ever early by rounding.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

from .durations import duration
from .errors import DelayTooLong, InvalidDueTime

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def due_us(eta: datetime | str) -> int:
    """The due time of an ETA, a datetime or ISO 8601 text, in microseconds since the epoch.

    A naive one is UTC, as Celery's workers read it (``celery.utils.time.maybe_make_aware``).
    InvalidDueTime: it is neither.
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
    """:func:`due_us`; None for no ETA, and for one that is no time."""
    try:
        return due_us(eta) if eta else None
    except InvalidDueTime:
        return None


def eta_of(due_us: int) -> str:
    """The ETA, as Celery writes it, of a due time in microseconds since the epoch."""
    return (_EPOCH + due_us * _MICROSECOND).isoformat()


def milliseconds_up(microseconds: int) -> int:
    """Microseconds in milliseconds, rounded up: never early."""
    return -(-microseconds // 1000)


def units_until(due_us: int, *, now_us: int, resolution_ms: int) -> int:
    """Units of the resolution from *now_us* until *due_us*, rounded up: never early.

    A due time in the past is 0.
    """
    return max(0, -((now_us - due_us) // (resolution_ms * 1000)))


def check_reach(units: int, *, max_units: int, resolution_ms: int) -> None:
    """Refuse a delay that the levels cannot hold, by DelayTooLong."""
    if units > max_units:
        raise DelayTooLong(
            _too_long(units * resolution_ms / 1000, max_units * resolution_ms / 1000)
        )


def check_due(due_us: int, *, now_us: int, longest_delay_seconds: float) -> None:
    """Refuse a delay beyond the longest, where nothing else bounds it; counted in milliseconds."""
    check_reach(
        milliseconds_up(due_us - now_us),
        max_units=round(longest_delay_seconds * 1000),
        resolution_ms=1,
    )


def check_countdown(countdown: object, *, longest_delay_seconds: float) -> None:
    """Refuse a countdown that is no time at all, or longer than the levels reach.

    Anything that is not a number is left to Celery's own checks.
    """
    if not isinstance(countdown, int | float):
        return
    if not math.isfinite(countdown):
        raise InvalidDueTime(
            f"expected a countdown of 0 to {duration(longest_delay_seconds)}, got {countdown!r}"
        )
    if countdown > longest_delay_seconds:
        raise DelayTooLong(_too_long(countdown, longest_delay_seconds))


def _too_long(delay_seconds: float, longest_delay_seconds: float) -> str:
    return (
        f"a delay of {duration(delay_seconds, exact=True)} exceeds the longest delay of "
        f"{duration(longest_delay_seconds, exact=True)}: raise native_delay_levels or "
        f"native_delay_resolution, or let celery beat send the task when it is nearer"
    )
