"""Durations as text: how they are written, and that the text can be parsed again."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay.durations import duration, moment_of, seconds_of
from celery_native_delay.errors import InvalidDueTime

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
