"""Fill the queues of rate-limited tasks, as workers do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

from celery import Celery

from celery_native_delay import Rate
from celery_native_delay.app.installation import delaying_channel
from celery_native_delay.rates.in_records import RecordedLines
from celery_native_delay.rates.line import Asked, Line

#: Windows of so much of a period are looked at: a machine that does much else may let more time
#: pass between a gate and its task than the hundredth that is reckoned with.
LOOKED_AT = 0.95


def most_in_a_window(starts: list[float], seconds: float) -> int:
    """The largest number of starts in any window of *seconds*."""
    ordered = sorted(starts)
    return max(
        sum(1 for other in ordered[place:] if other < first + seconds)
        for place, first in enumerate(ordered)
    )


@contextmanager
def lines_of(app: Celery) -> Iterator[RecordedLines]:
    """The rate limiter of *app*, on its broker or in its records."""
    with app.connection_for_write() as connection:
        channel, settings = delaying_channel(app, connection)
        with closing(channel.lines(settings)) as lines:
            yield lines


def fill(
    app: Celery, task: str, key: str | None, limit: str, *, waiting: int, held_seconds: float = 0
) -> None:
    """Let one task of a rate start, and queue others behind it."""
    with lines_of(app) as lines:
        for _ in range(1 + waiting):
            lines.ask([Asked(task, key, Rate(limit))])
        if held_seconds:
            hold = partial(Line.hold, wait_us=round(held_seconds * 1_000_000))
            lines.change(Asked(task, key, Rate(limit)), hold)
