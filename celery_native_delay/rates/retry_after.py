"""``RetryAfter``: a task's word that it was turned away, and for how long. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

#: Seconds for a word that cannot be understood: better some than none.
DEFAULT_SECONDS = 60.0

LONGEST_SECONDS = 30 * 86_400.0


class RetryAfter(Exception):
    """Raised by a task that has a rate: it is retried later, and its whole line waits as long.

    >>> raise RetryAfter(30)
    Traceback (most recent call last):
    celery_native_delay.rates.retry_after.RetryAfter: 30

    Args:
        when: seconds, or what an HTTP server has sent as its header ``Retry-After``: seconds as
            text, or a date.
    """

    def __init__(self, when: float | str) -> None:
        super().__init__(when)
        self.when = when

    def seconds(self, now: datetime) -> float:
        """Seconds from *now*, 0 for what is past; a minute for what is neither number nor date."""
        try:
            found = float(self.when)
        except (TypeError, ValueError):
            found = _until(self.when, now)
        return min(max(found, 0.0), LONGEST_SECONDS) if found == found else DEFAULT_SECONDS


def _until(date: object, now: datetime) -> float:
    try:
        when = parsedate_to_datetime(str(date))
    except ValueError:
        return DEFAULT_SECONDS
    # One with the zone -0000 is naive, and UTC.
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - now.timestamp()
