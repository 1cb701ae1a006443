"""What a driver shows and says while executors send."""

from __future__ import annotations

import logging
from time import monotonic
from types import SimpleNamespace

import pytest

pytest.importorskip("pyspark")

from celery_native_delay.spark.live_counts import CountsReport, LiveCounts


@pytest.fixture
def counts() -> LiveCounts:
    """The counts of a driver in a terminal, which has had reports for ten seconds."""
    counts = LiveCounts(SimpleNamespace(), "job")
    counts._shows, counts._began = True, monotonic() - 10
    counts._add(CountsReport("job", 0, 7, encoded=5_000, first_us=1), None)
    return counts


def test_progress_shows_rows_rate_confirms_and_the_time_left(
    counts: LiveCounts, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says when the last is sent, if others are due before."""
    with caplog.at_level(logging.WARNING):
        counts._add(CountsReport("job", 0, 8, sent=1_100, confirmed=1_000, in_doubt=100), None)
        counts._add(CountsReport("job", 0, 8, sent=1_200, confirmed=1_100, in_doubt=100), None)
    line = capsys.readouterr().err
    assert "1,100 of 5,000 tasks sent, 1,000 confirmed, 100/s, 40 s left" in line
    assert caplog.text.count("tasks that are due before may be late") == 1


def test_tasks_of_a_repeated_attempt_are_counted(counts: LiveCounts) -> None:
    counts._add(CountsReport("job", 0, 8, sent=1_023), None)
    counts._add(CountsReport("job", 0, 9, sent=2_000), None)
    counts._add(CountsReport("job", 1, 10, sent=2_000), None)
    assert counts.sent_again({(0, 9), (1, 10)}) == 1_023
