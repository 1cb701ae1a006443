"""Countdowns, ETAs and durations: as units of the resolution, at most one late, and as text."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay.due_time import check_countdown, check_due, due_us, units_until
from celery_native_delay.durations import duration, moment_of, seconds_of
from celery_native_delay.errors import DelayTooLong, InvalidDueTime

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
NOON_US = 1_795_176_000_000_000

microseconds = st.integers(0, 2**62)
resolutions_ms = st.integers(1, 3_600_000)


@given(now_us=microseconds, wait_us=st.integers(-(10**12), 10**16), resolution_ms=resolutions_ms)
def test_never_early_and_at_most_one_resolution_late(
    now_us: int, wait_us: int, resolution_ms: int
) -> None:
    units = units_until(now_us + wait_us, now_us=now_us, resolution_ms=resolution_ms)
    late_us = units * resolution_ms * 1000 - max(wait_us, 0)
    assert 0 <= late_us < resolution_ms * 1000


@pytest.mark.parametrize("later_us", [0, 1, 7, 300, 999])
def test_a_countdown_of_5_s_is_40_units_even_up_to_a_millisecond_later(later_us: int) -> None:
    """Celery makes the ETA before we look at the clock. That time costs no further unit."""
    assert units_until(NOON_US + 5_000_000, now_us=NOON_US + later_us, resolution_ms=125) == 40


@pytest.mark.parametrize(
    "eta",
    [
        NOON,
        datetime(2026, 11, 20, 12, 0),
        datetime(2026, 11, 20, 17, 30, tzinfo=timezone(timedelta(hours=5, minutes=30))),
        "2026-11-20T12:00:00+00:00",
        "2026-11-20T12:00:00Z",
        "2026-11-20T12:00:00",
        "2026-11-20T07:00:00-05:00",
    ],
    ids=str,
)
def test_an_eta_may_be_written_in_any_way_and_a_naive_one_is_utc(eta: datetime | str) -> None:
    assert due_us(eta) == NOON_US


@given(moment=st.datetimes(timezones=st.timezones()), more_us=st.integers(0, 10**9))
def test_microseconds_are_exact_in_every_time_zone(moment: datetime, more_us: int) -> None:
    text = moment.isoformat()
    assert due_us(text) == due_us(moment)
    in_utc = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=due_us(moment))
    assert in_utc - moment == timedelta(0)


def test_a_naive_eta_is_utc_in_every_local_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        assert due_us(datetime(2026, 11, 20, 12, 0)) == NOON_US
        assert due_us("2026-11-20T12:00:00") == NOON_US
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("eta", ["", "tomorrow", "2026-13-01T00:00:00", "12:00", "NaN"])
def test_the_error_for_an_invalid_eta_shows_a_valid_one(eta: str) -> None:
    with pytest.raises(InvalidDueTime, match="ISO 8601 such as 2026-11-20T09:30:00") as refused:
        due_us(eta)
    assert f"got {eta!r}" in str(refused.value)
    assert refused.value.__cause__ is not None


def test_a_countdown_that_is_not_finite_or_too_long_is_refused_with_the_limit() -> None:
    for countdown in (math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidDueTime, match=f"0 to 3106 d 21 h, got {countdown!r}"):
            check_countdown(countdown, longest_delay_seconds=268_435_455)
    longest = "exceeds the longest delay of 3106 d 21 h 24 min 15.875 s: let celery beat"
    with pytest.raises(DelayTooLong, match=f"115740 d 17 h 46 min 40 s {longest}"):
        check_countdown(10**10, longest_delay_seconds=268_435_455.875)


def test_the_error_for_a_too_late_eta_names_value_limit_and_remedy() -> None:
    longest_us = (2**31 - 1) * 125_000
    check_due(longest_us, now_us=0, longest_delay_seconds=longest_us / 1_000_000)
    with pytest.raises(DelayTooLong, match=r"24 min 16 s .* 24 min 15\.875 s: let celery beat"):
        check_due(2**31 * 125_000, now_us=0, longest_delay_seconds=longest_us / 1_000_000)


# ---- durations as text ---------------------------------------------------------------------------


DAY, HOUR, MINUTE = 86_400, 3600, 60

spans_seconds = st.integers(0, 4_000 * DAY * 1000).map(lambda ms: ms / 1000)


def shown_to_seconds(seconds: float) -> float:
    """The precision in which *seconds* are written."""
    for least, step in ((DAY, HOUR), (HOUR, MINUTE), (10, 1), (1, 0.1)):
        if seconds >= least:
            return step
    return 0.001


@given(spans_seconds)
def test_an_exact_duration_is_parsed_back_to_the_millisecond(seconds: float) -> None:
    assert seconds_of(duration(seconds, exact=True)) == seconds
    assert seconds_of(duration(-seconds, exact=True)) == -seconds


@given(spans_seconds)
def test_a_duration_is_parsed_back_to_the_precision_written(seconds: float) -> None:
    told = duration(seconds)
    assert abs(seconds_of(told) - seconds) <= shown_to_seconds(seconds) / 2 + 1e-6
    assert duration(seconds_of(told)) == told
    assert len(told.split()) <= 4


@given(spans_seconds)
def test_a_duration_rounded_up_is_never_too_short(seconds: float) -> None:
    told = seconds_of(duration(seconds, up=True))
    assert 0 <= told - seconds < shown_to_seconds(seconds)


def test_durations_are_written_in_their_two_largest_units() -> None:
    for seconds, told in (
        (0.0004, "0 s"),
        (0.125, "0.125 s"),
        (9.96, "10 s"),
        (59.7, "1 min"),
        (3599.6, "1 h"),
        (100_000, "1 d 4 h"),
        (-90, "-1 min 30 s"),
    ):
        assert duration(seconds) == told
    assert duration(100_000.3, exact=True) == "1 d 3 h 46 min 40.3 s"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1.5", 1.5),
        ("1e3", 1000),
        ("1h30m", 5400),
        ("1H30M", 5400),
        ("2d", 2 * DAY),
        (" 2 days 12 hours ", 2.5 * DAY),
        ("-1h", -3600),
        ("+2 h", 7200),
    ],
)
def test_durations_are_parsed_in_every_usual_notation(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "-", "h", "1y", "30m1h", "1h1h", "1:30", "nan", "inf", "1h30", "soon", "1,5h"]
)
def test_the_error_for_an_invalid_duration_shows_examples(text: str) -> None:
    with pytest.raises(InvalidDueTime, match=r"such as 1h30m, 1h 30min or 2d, got "):
        seconds_of(text)


@pytest.mark.parametrize(
    ("text", "then"),
    [
        ("90", "2026-03-28T12:01:30+01:00"),
        ("2 h", "2026-03-28T14:00:00+01:00"),
        ("18h", "2026-03-29T07:00:00+02:00"),  # the clocks change at 2:00
        ("today 18:30", "2026-03-28T18:30:00+01:00"),
        ("Tomorrow 09:00", "2026-03-29T09:00:00+02:00"),
        ("2026-04-01 08:00", "2026-04-01T08:00:00+02:00"),
        ("2026-04-01T08:00Z", "2026-04-01T08:00:00+00:00"),
    ],
)
def test_a_time_is_parsed_as_people_write_it_in_the_zone_of_now(text: str, then: str) -> None:
    now = datetime(2026, 3, 28, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    assert moment_of(text, now).isoformat() == then


def test_the_error_for_an_invalid_time_shows_examples() -> None:
    for text in ("", "soon", "tomorrow", "tomorrow 25:00", "09:00 tomorrow", "1e9d"):
        with pytest.raises(InvalidDueTime, match="tomorrow 09:00"):
            moment_of(text, datetime.now(UTC))
    with pytest.raises(InvalidDueTime, match="too far away"):
        moment_of("1e12", datetime.now(UTC))
