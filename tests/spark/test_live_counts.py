"""What a driver shows and says while executors send."""

from __future__ import annotations

import logging
from time import time_ns
from types import SimpleNamespace

import pytest

pytest.importorskip("pyspark")

from celery_native_delay.spark.live_counts import CountsReport, LiveCounts

NOW = 1_000.0


@pytest.fixture
def counts() -> LiveCounts:
    """The counts of a driver in a terminal, which has had reports for ten seconds."""
    counts = LiveCounts(SimpleNamespace(), "job")
    counts._shows, counts._began = True, NOW - 10
    due_us = [time_ns() // 1000 + seconds * 1_000_000 for seconds in (-5, -1, 600, 3_600, 3_601)]
    counts._add(CountsReport("job", 0, 7, encoded=5_000, some_us=due_us), None, NOW)
    return counts


def test_progress_shows_rows_rate_confirms_and_the_time_left(
    counts: LiveCounts, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says which will be late: at 100/s, the first two thousand of five."""
    with caplog.at_level(logging.WARNING):
        counts._add(CountsReport("job", 0, 8, sent=1_100, confirmed=1_000, in_doubt=100), None, NOW)
        counts._add(CountsReport("job", 0, 8, sent=1_200, confirmed=1_100, in_doubt=100), None, NOW)
    line = capsys.readouterr().err
    assert "1,100 of 5,000 tasks sent, 1,000 confirmed, 100/s, 40 s left" in line
    (record,) = caplog.records
    assert "at 100 tasks/s, sending ends at " in record.message
    assert "about 2,000 of 5,000 tasks will be late, those due from " in record.message


def test_tasks_of_a_repeated_attempt_are_counted(counts: LiveCounts) -> None:
    counts._add(CountsReport("job", 0, 8, sent=1_023), None, NOW)
    counts._add(CountsReport("job", 0, 9, sent=2_000), None, NOW)
    counts._add(CountsReport("job", 1, 10, sent=2_000), None, NOW)
    assert counts.sent_again({(0, 9), (1, 10)}) == 1_023
