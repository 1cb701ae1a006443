"""Wait for a condition instead of sleeping a fixed time."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

import pytest

T = TypeVar("T")

#: How many times slower than ours this machine may be: stretches every limit of the tests.
SLOWNESS = float(os.environ.get("NATIVE_DELAY_TEST_SLOWNESS", "1"))

#: Nothing takes this long, even while other programs use the machine: what has not come by then
#: never will. A test that passes never waits it out.
PATIENCE_SECONDS = 90 * SLOWNESS

#: Between two looks at a condition, which may cost a broker more than what is waited for.
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.01, 0.1


def wait_until(
    condition: Callable[[], T | None], *, timeout_seconds: float = PATIENCE_SECONDS
) -> T:
    """Return the first value of *condition* that is neither None nor False.

    Fails the test if there is no such value within *timeout_seconds*.
    """
    deadline = monotonic() + timeout_seconds
    pause_seconds = SHORTEST_PAUSE_SECONDS
    while True:
        value = condition()
        if value is not None and value is not False:
            return value
        if monotonic() > deadline:
            name = getattr(condition, "__qualname__", repr(condition))
            pytest.fail(f"{name} not seen within {timeout_seconds} s; last value {value!r}")
        sleep(pause_seconds)
        pause_seconds = min(1.5 * pause_seconds, LONGEST_PAUSE_SECONDS)
