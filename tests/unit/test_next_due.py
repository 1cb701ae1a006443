"""The next due time of a schedule, against a scan of every minute and against Celery's beat."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

import pytest
from celery.schedules import crontab, schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_native_delay.schedules.next_due import next_due

BERLIN = ZoneInfo("Europe/Berlin")
MINUTE = timedelta(minutes=1)

#: Zones whose clocks change by an hour, by half an hour, at midnight, by a whole day, and never.
ZONES = [
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "America/Santiago",
    "Asia/Beirut",
    "Pacific/Apia",
    "Africa/Casablanca",
    "Asia/Kolkata",
    "UTC",
]


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def local(of: object, after: str, count: int, zone: ZoneInfo = BERLIN) -> list[str]:
    """The next due times, as clocks in *zone* show them."""
    moment, shown = at(after), []
    for _ in range(count):
        found = next_due(of, moment, zone)
        assert found is not None
        moment = found
        shown.append(moment.astimezone(zone).isoformat(timespec="minutes"))
    return shown


def test_an_interval_runs_on_while_the_clocks_change() -> None:
    every_minute = schedule(timedelta(minutes=1))
    for begin in ("2026-10-25T00:58+00:00", "2026-10-25T01:58+00:00", "2026-03-29T00:58+00:00"):
        assert next_due(every_minute, at(begin), BERLIN) == at(begin) + MINUTE
        assert next_due(every_minute, at(begin) + MINUTE, BERLIN) == at(begin) + 2 * MINUTE
    daily = schedule(timedelta(days=1), relative=True)
    assert local(daily, "2026-10-24T12:00+00:00", 3) == [
        "2026-10-25T00:00+02:00",
        "2026-10-26T00:00+01:00",
        "2026-10-27T00:00+01:00",
    ]


def test_day_of_month_and_day_of_week_must_both_fit_as_in_celery() -> None:
    monday_29 = crontab(hour=0, minute=0, day_of_month=29, month_of_year=2, day_of_week="mon")
    assert local(monday_29, "2027-01-01T00:00+00:00", 1, ZoneInfo("UTC")) == [
        "2044-02-29T00:00+00:00"
    ]


@st.composite
def crontabs(draw: st.DrawFn) -> crontab:
    def chosen(low: int, high: int) -> str:
        return ",".join(map(str, draw(st.sets(st.integers(low, high), min_size=1, max_size=3))))

    def some(low: int, high: int) -> str:
        return draw(st.sampled_from(["*", chosen(low, high)]))

    return crontab(
        minute=chosen(0, 59), hour=some(0, 23), day_of_week=some(0, 6), day_of_month=some(1, 28)
    )


def scanned(of: crontab, after: datetime, zone: ZoneInfo, days: int) -> list[datetime]:
    """Due times by looking at every minute of *days* days."""
    due: list[datetime] = []
    moment = after.replace(second=0, microsecond=0)
    before = moment.astimezone(zone).replace(tzinfo=None)
    every_hour = of.hour == set(range(24))
    for _ in range(days * 1440):
        moment += MINUTE
        shown = moment.astimezone(zone)
        wall = shown.replace(tzinfo=None)
        skipped = [before + n * MINUTE for n in range(1, int((wall - before) / MINUTE))]
        named = [] if every_hour else skipped
        if every_hour or shown.fold == 0:
            named = [*named, wall]
        before = wall
        if any(fits(of, each) for each in named):
            due.append(moment)
    return due


def fits(of: crontab, wall: datetime) -> bool:
    return bool(
        wall.minute in of.minute
        and wall.hour in of.hour
        and wall.isoweekday() % 7 in of.day_of_week
        and wall.day in of.day_of_month
        and wall.month in of.month_of_year
    )


#: A day before clocks change, of every zone above.
EVES = ["2026-03-28", "2026-10-24", "2026-04-04", "2026-03-07", "2026-10-31", "2011-12-28"]


@settings(max_examples=30)
@given(crontabs(), st.sampled_from(ZONES), st.sampled_from(EVES), st.integers(0, 1439))
def test_it_finds_what_a_scan_of_every_minute_finds(
    of: crontab, name: str, eve: str, minute: int
) -> None:
    zone = ZoneInfo(name)
    after = at(eve + "T00:00+00:00") + minute * MINUTE
    due = scanned(of, after, zone, 3)
    found, moment = [], after
    while (later := next_due(of, moment, zone)) is not None and later <= after + 3 * 1440 * MINUTE:
        found.append(moment := later)
    assert found == due


def changes_of_clocks() -> list[tuple[str, datetime]]:
    """Each way in which the clocks of a zone have changed since 2000, once, with a time before."""
    found = {}
    step = timedelta(days=10)
    for name in sorted(available_timezones()):
        zone, moment = ZoneInfo(name), at("2000-01-10T00:00+00:00")
        while moment.year < 2038:
            low, moment = moment, moment + step
            if low.astimezone(zone).utcoffset() == moment.astimezone(zone).utcoffset():
                continue
            high = moment
            while high - low > MINUTE:
                middle = low + (high - low) // 2
                changed = middle.astimezone(zone).utcoffset() != low.astimezone(zone).utcoffset()
                low, high = (low, middle) if changed else (middle, high)
            before, after = low.astimezone(zone), high.astimezone(zone)
            found[before.hour, before.minute, after.hour, after.minute] = (name, low)
    return list(found.values())


def test_each_change_of_clocks_in_the_world_skips_and_repeats_no_run() -> None:
    changes = changes_of_clocks()
    assert len(changes) > 30
    for of in (crontab(minute="*/20"), crontab(minute="10,50", hour="0-22")):
        for name, moment in changes:
            zone = ZoneInfo(name)
            after = moment - timedelta(hours=4, minutes=7)
            due = scanned(of, after, zone, 1)
            found = [next_due(of, after, zone)]
            while len(found) < len(due):
                found.append(next_due(of, found[-1], zone))
            assert found == due, (name, moment)


@pytest.mark.parametrize(
    "of",
    [
        crontab(minute="*/15"),
        crontab(hour="2,14", minute=30),
        crontab(hour=0, minute=0, day_of_month="1,15"),
        crontab(hour=6, minute=5, day_of_week="mon-fri", month_of_year="*/3"),
    ],
    ids=str,
)
def test_beat_agrees_for_a_year_without_a_change_of_clocks(of: crontab) -> None:
    moment = at("2026-01-01T00:00+00:00")
    of.tz = UTC
    while moment.year == 2026:
        of.nowfun = lambda moment=moment: moment
        expected = moment + of.remaining_estimate(moment)
        found = next_due(of, moment, UTC)
        assert found == expected
        moment = found
