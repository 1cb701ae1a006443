"""The clock of this package, which tests can stop."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: The test clock's time, in nanoseconds since the epoch; None without a test clock.
stopped_at_ns: int | None = None


def time_ns() -> int:
    """Return the current time in nanoseconds since the epoch."""
    return time.time_ns() if stopped_at_ns is None else stopped_at_ns


def utc_now() -> datetime:
    return moment(time_ns() // 1000)


def moment(us: int) -> datetime:
    """Convert *us* (microseconds since the epoch) to a datetime in UTC."""
    return _EPOCH + timedelta(microseconds=us)


def stop_at(us: int | None) -> None:
    """Freeze this package's clock at *us* (epoch microseconds); None lets the clock run again."""
    global stopped_at_ns
    stopped_at_ns = None if us is None else us * 1000
