"""The next due time of a schedule, on the wall clock of its time zone. Pure.

Celery's own `crontab.remaining_estimate` returns a duration. A duration that was computed before
the clocks change is an hour off afterwards.
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

_MINUTE = timedelta(minutes=1)
_SECOND = timedelta(seconds=1)
_EVERY_HOUR = frozenset(range(24))


def next_due(of: Any, after: datetime, zone: tzinfo) -> datetime | None:
    """The first due time of the schedule *of* that is later than *after*; None if there is none.

    A `crontab` names local times. A local time that is skipped when the clocks go forward is due at
    that moment. A local time that comes twice when the clocks go back is due the first time. A
    crontab for every hour names no local hour: it is due in each hour that passes.

    Args:
        of: a schedule of Celery's, or of a class with Celery's `remaining_estimate`.
        after: an aware time.
        zone: the time zone of the wall clock.

    Returns:
        an aware time in UTC.
    """
    if isinstance(of, crontab):
        found = _hourly(of, after, zone) if of.hour == _EVERY_HOUR else _daily(of, after, zone)
        return next((each for each in found if each > after), None)
    if isinstance(of, schedule):
        local: datetime = after.astimezone(zone) + of.run_every
        if of.relative:
            local = delta_resolution(local, of.run_every)
        return max(local.astimezone(UTC), after + timedelta.resolution)
    own = copy(of)
    own.nowfun = lambda: after
    due: datetime = after + own.remaining_estimate(after)
    return due.astimezone(UTC) if due > after else None


def _daily(of: crontab, after: datetime, zone: tzinfo) -> Iterator[datetime]:
    """Due times of a crontab that names hours; local times in order are instants in order."""
    wall = after.astimezone(zone).replace(tzinfo=None, second=0, microsecond=0)
    hours, minutes = sorted(of.hour), sorted(of.minute)
    for day in _days(of, wall.date()):
        for hour in hours:
            if day == wall.date() and hour < wall.hour:
                continue
            for minute in minutes:
                yield _instant(datetime(day.year, day.month, day.day, hour, minute), zone)


def _hourly(of: crontab, after: datetime, zone: tzinfo) -> Iterator[datetime]:
    """Due times of a crontab for every hour, by the minutes that pass."""
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
    """Days of a crontab; Celery asks for the day of the month and the day of the week."""
    day = first
    while day.year <= min(first.year + _LONGEST_YEARS, date.max.year - 1):
        if day.month not in of.month_of_year:
            day = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
            continue
        if day.day in of.day_of_month and day.isoweekday() % 7 in of.day_of_week:
            yield day
        day += timedelta(days=1)


def _instant(wall: datetime, zone: tzinfo) -> datetime:
    """The first moment at which clocks in *zone* show *wall*, or skip it."""
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
