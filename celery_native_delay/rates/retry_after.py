"""``RetryAfter``: an exception that retries a rate-limited task after a given time."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from ..errors import InvalidDueTime

#: Seconds after a task first raises RetryAfter in which it is retried; also the longest wait.
RETRIED_FOR_SECONDS = 86_400.0


class RetryAfter(Exception):
    """Raise this exception in a task to retry the task later.

    >>> raise RetryAfter(30)
    Traceback (most recent call last):
    celery_native_delay.rates.retry_after.RetryAfter: 30

    Until the retry, all tasks with the same rate limit and key wait, too. If the task has no rate
    limit, only this task waits. The retry comes after at most a day, even if *when* is later. The
    task fails if it raises RetryAfter again more than a day after its first RetryAfter. In eager
    mode Celery retries the task at once, and counts the retry.

    Args:
        when: seconds, or the text of an HTTP header ``Retry-After`` (seconds or a date).
        counts: True to count this retry for ``max_retries``. By default, the retry is not counted.

    Raises:
        InvalidDueTime: *when* is neither seconds nor a date.
    """

    def __init__(self, when: float | str, *, counts: bool = False) -> None:
        super().__init__(when)
        self.when = when
        self.counts = counts
        self._parsed = _parsed(when)

    def seconds(self, now: datetime) -> float:
        """Return the seconds from *now* until the retry: 0 or more."""
        parsed = self._parsed
        if isinstance(parsed, datetime):
            parsed = parsed.timestamp() - now.timestamp()
        return max(parsed, 0.0)


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
