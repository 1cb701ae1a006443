"""Back-off between attempts, and values that each process makes for itself."""

from __future__ import annotations

import os

import pytest

from celery_native_delay.backoff import Backoff
from celery_native_delay.per_process import PerProcess


def test_each_failure_doubles_the_pause_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.failed() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_reset_returns_to_the_shortest_pause_and_tells_if_there_was_a_failure() -> None:
    backoff = Backoff(0.1, 5.0)
    assert not backoff.reset()
    backoff.failed()
    assert backoff.reset()
    assert backoff.seconds == 0.1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_value_is_made_once_per_key_and_anew_by_a_forked_child() -> None:
    abandoned: list[list[int]] = []
    made: PerProcess[str, list[int]] = PerProcess(abandoned.append)
    ours = made.get("a", list)
    assert made.get("a", list) is ours is not made.get("b", list)
    child = os.fork()
    if child == 0:  # no assertion may leave this block
        good = made.values() == [] and len(abandoned) == 2 and abandoned[0] is ours
        os._exit(0 if good and made.get("a", list) is not ours else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert made.get("a", list) is ours
    assert abandoned == []
