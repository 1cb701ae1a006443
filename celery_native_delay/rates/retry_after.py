"""``RetryAfter``: the exception of a rate-limited task that a server has turned away. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from ..errors import InvalidDueTime

LONGEST_SECONDS = 30 * 86_400.0


class RetryAfter(Exception):
    """Raise this in a task with a rate: the task is retried later, and all tasks of its key wait.

    >>> raise RetryAfter(30)
    Traceback (most recent call last):
    celery_native_delay.rates.retry_after.RetryAfter: 30

    In a task without a rate, with ``task_always_eager`` and in ``.apply()`` it is an ordinary
    failure.

    Args:
        when: seconds, or the value of an HTTP server's header ``Retry-After``: seconds as text, or
            a date.

    Raises:
        InvalidDueTime: *when* is none of these.
    """

    def __init__(self, when: float | str) -> None:
        super().__init__(when)
        self.when = when
        self._parsed = _parsed(when)

    def seconds(self, now: datetime) -> float:
        """The wait in seconds from *now*: 0 for a past date, at most 30 days."""
        parsed = self._parsed
        if isinstance(parsed, datetime):
            parsed = parsed.timestamp() - now.timestamp()
        return min(max(parsed, 0.0), LONGEST_SECONDS)


def _parsed(when: object) -> float | datetime:
    """*when* as seconds, or as a date."""
    if isinstance(when, int | float | str):
        try:
            seconds = float(when)
        except (ValueError, OverflowError):
            pass
        else:
            if math.isfinite(seconds):
                return seconds
    if isinstance(when, str):
        try:
            date = parsedate_to_datetime(when)
            # A date with the zone -0000 is parsed without a zone; it is in UTC.
            date = date if date.tzinfo else date.replace(tzinfo=UTC)
            date.timestamp()
            return date
        except (ValueError, OverflowError, IndexError, TypeError):
            pass
    raise InvalidDueTime(
        f'expected RetryAfter(…) of seconds, or of an HTTP server\'s Retry-After such as "30" or '
        f'"Fri, 20 Nov 2026 09:30:00 GMT", got {when!r}'
    )
