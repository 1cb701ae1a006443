"""Computes the next due time of a Celery schedule.

Celery's own ``crontab.remaining_estimate`` is wrong by an hour when daylight saving time changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from datetime import UTC, date, datetime, timedelta, tzinfo
from heapq import merge
from itertools import product
from typing import Any
from zoneinfo import ZoneInfo

from celery.schedules import crontab, schedule
from celery.utils.time import delta_resolution

from ..errors import CannotDelay

#: A crontab such as February 29 on a Monday is due again after at most this many years.
_LONGEST_YEARS = 40

_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)
_EVERY_HOUR = frozenset(range(24))


def next_due(of: Any, after: datetime, zone: tzinfo) -> datetime | None:
    """Return the schedule's first due time later than *after*, in UTC; None if there is none.

    A crontab contains local times of *zone*. A local time that the clocks skip is due at the clock
    change. A local time that occurs twice is due the first time only. The only exception: a crontab
    for every hour is due both times. Raises CannotDelay for an interval of 0 s or less.
    """
    if isinstance(of, crontab):
        return next((each for each in _instants(of, after, zone) if each > after), None)
    if isinstance(of, schedule):
        if of.run_every <= timedelta(0):
            raise CannotDelay(
                f"expected an interval above 0 s, got {of.run_every.total_seconds():g} s"
            )
        local: datetime = (after + of.run_every).astimezone(zone)
        if of.relative and of.run_every >= _DAY:
            local = after.astimezone(zone) + of.run_every
        if of.relative:
            local = delta_resolution(local, of.run_every)
        return max(local.astimezone(UTC), after + timedelta.resolution)
    own = copy(of)
    own.nowfun = lambda: after
    due: datetime = after + own.remaining_estimate(after)
    return due.astimezone(UTC) if due > after else None


def with_folds(zone: tzinfo) -> tzinfo:
    """Return a time zone that follows PEP 495: one of pytz does not, and is read by its name."""
    name = getattr(zone, "zone", None)
    return ZoneInfo(name) if isinstance(name, str) else zone


def _instants(of: crontab, after: datetime, zone: tzinfo) -> Iterator[datetime]:
    """Yield a crontab's due times in UTC in order, beginning at or before *after*."""
    wall, tomorrow = (each.astimezone(zone) for each in (after, after + _DAY))
    first = wall.replace(tzinfo=None)
    if of.hour != _EVERY_HOUR:
        yield from _moments(of, first, zone, fold=0)
        return
    # The clocks may go back within a day, and then show times before *first* again.
    again = min(first, tomorrow.replace(tzinfo=None) - _DAY)
    yield from merge(_moments(of, first, zone, fold=0), _moments(of, again, zone, fold=1))


def _moments(of: crontab, first: datetime, zone: tzinfo, *, fold: int) -> Iterator[datetime]:
    """Yield the due times of one *fold*, which are in order, from the local time *first* on."""
    skips = of.hour == _EVERY_HOUR
    for day in _days(of, first.date()):
        start = (first.hour, first.minute) if day == first.date() else (0, 0)
        for hour, minute in product(sorted(of.hour), sorted(of.minute)):
            if (hour, minute) >= start:
                time = datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone, fold=fold)
                moment = time.astimezone(UTC)
                if moment.astimezone(zone).replace(tzinfo=None) == time.replace(tzinfo=None):
                    yield moment
                elif not skips:
                    yield _jump(time)


def _days(of: crontab, first: date) -> Iterator[date]:
    """Yield the days on which a crontab runs, from *first* on."""
    day = first
    while day.year <= min(first.year + _LONGEST_YEARS, date.max.year - 1):
        if day.month not in of.month_of_year:
            day = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
            continue
        if day.day in of.day_of_month and day.isoweekday() % 7 in of.day_of_week:
            yield day
        day += _DAY


def _jump(time: datetime) -> datetime:
    """Return the moment in UTC at which the clocks skip a local time."""
    # PEP 495: of a time that is skipped, fold=1 is before the jump and fold=0 is after it.
    before, after = (time.replace(fold=fold).astimezone(UTC) for fold in (1, 0))
    old = before.astimezone(time.tzinfo).utcoffset()
    while after - before > _SECOND:
        middle = (before + (after - before) // 2).replace(microsecond=0)
        if middle.astimezone(time.tzinfo).utcoffset() == old:
            before = middle
        else:
            after = middle
    return after
