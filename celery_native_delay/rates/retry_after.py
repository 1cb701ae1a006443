"""``RetryAfter``: the exception that a task raises when a server refuses a request."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from ..errors import InvalidDueTime

LONGEST_SECONDS = 30 * 86_400.0


class RetryAfter(Exception):
    """Retry a task later, and let all tasks with the same rate and key wait until then.

    >>> raise RetryAfter(30)
    Traceback (most recent call last):
    celery_native_delay.rates.retry_after.RetryAfter: 30

    If the task has no rate, only this task waits. In eager mode Celery retries the task at once,
    and counts the retry.

    Args:
        when: seconds, or the value of an HTTP server's header ``Retry-After``: seconds as text, or
            a date.
        counts: count this retry for the task's ``max_retries``. By default it is not counted, and
            the task fails with this exception one day after its first RetryAfter. The setting
            ``native_delay_retry_after_limit`` changes that day.

    Raises:
        InvalidDueTime: *when* is neither seconds nor a date.
    """

    def __init__(self, when: float | str, *, counts: bool = False) -> None:
        super().__init__(when)
        self.when = when
        self.counts = counts
        self._parsed = _parsed(when)

    def seconds(self, now: datetime) -> float:
        """Return the wait in seconds from *now*: 0 for a past date, and at most 30 days."""
        parsed = self._parsed
        if isinstance(parsed, datetime):
            parsed = parsed.timestamp() - now.timestamp()
        return min(max(parsed, 0.0), LONGEST_SECONDS)


def _parsed(when: object) -> float | datetime:
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
