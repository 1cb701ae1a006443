"""Computes the next due time of a Celery schedule.

Celery's own ``crontab.remaining_estimate`` is wrong by an hour when daylight saving time changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Any

from celery.schedules import crontab, schedule
from celery.utils.time import delta_resolution

#: A crontab such as February 29 on a Monday is due again after at most this many years.
_LONGEST_YEARS = 40

_DAY = timedelta(days=1)
_MINUTE = timedelta(minutes=1)
_SECOND = timedelta(seconds=1)
_EVERY_HOUR = frozenset(range(24))


def next_due(of: Any, after: datetime, zone: tzinfo) -> datetime | None:
    """Return the schedule's first due time later than *after*, in UTC, or None.

    A crontab contains local times of *zone*. A local time that the clocks skip is due at the clock
    change. A local time that occurs twice is due the first time. A crontab for every hour is due in
    each hour, also in a repeated hour.
    """
    if isinstance(of, crontab):
        found = _hourly(of, after, zone) if of.hour == _EVERY_HOUR else _daily(of, after, zone)
        return next((each for each in found if each > after), None)
    if isinstance(of, schedule):
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


def _daily(of: crontab, after: datetime, zone: tzinfo) -> Iterator[datetime]:
    """Yield the due times of a crontab that does not run every hour."""
    wall = after.astimezone(zone).replace(tzinfo=None, second=0, microsecond=0)
    hours, minutes = sorted(of.hour), sorted(of.minute)
    for day in _days(of, wall.date()):
        for hour in hours:
            if day == wall.date() and hour < wall.hour:
                continue
            for minute in minutes:
                yield _instant(datetime(day.year, day.month, day.day, hour, minute), zone)


def _hourly(of: crontab, after: datetime, zone: tzinfo) -> Iterator[datetime]:
    """Yield the due times of a crontab that runs every hour."""
    minutes = sorted(of.minute)
    moment = after.astimezone(UTC).replace(second=0, microsecond=0)
    days = _days(of, moment.astimezone(zone).date())
    day = next(days, None)
    while day is not None:
        wall = moment.astimezone(zone)
        if wall.date() < day:
            moment = _instant(datetime(day.year, day.month, day.day), zone)
        elif wall.date() > day:
            day = next(days, None)
        else:
            if wall.minute in of.minute:
                yield moment
            later = next((each for each in minutes if each > wall.minute), 60)
            moment += (later - wall.minute) * _MINUTE


def _days(of: crontab, first: date) -> Iterator[date]:
    """Yield the days on which a crontab runs, from *first* on."""
    day = first
    while day.year <= min(first.year + _LONGEST_YEARS, date.max.year - 1):
        if day.month not in of.month_of_year:
            day = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
            continue
        if day.day in of.day_of_month and day.isoweekday() % 7 in of.day_of_week:
            yield day
        day += timedelta(days=1)


def _instant(wall: datetime, zone: tzinfo) -> datetime:
    """Convert a local time to UTC; a skipped time becomes the clock change's time."""
    moment = wall.replace(tzinfo=zone).astimezone(UTC)
    if moment.astimezone(zone).replace(tzinfo=None) == wall:
        return moment
    # PEP 495: of a time that is skipped, fold=1 is before the jump and fold=0 is after it.
    before = wall.replace(tzinfo=zone, fold=1).astimezone(UTC)
    old = before.astimezone(zone).utcoffset()
    while moment - before > _SECOND:
        middle = (before + (moment - before) // 2).replace(microsecond=0)
        if middle.astimezone(zone).utcoffset() == old:
            before = middle
        else:
            moment = middle
    return moment
