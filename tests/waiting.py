"""Wait for a condition instead of sleeping a fixed time."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

import pytest

T = TypeVar("T")

#: Multiplies every time limit of the tests, for slow machines.
SLOWNESS = float(os.environ.get("NATIVE_DELAY_TEST_SLOWNESS", "1"))

#: No expected event takes this long, even on a busy machine. A passing test never waits for the
#: whole time.
PATIENCE_SECONDS = 90 * SLOWNESS

#: Pauses between two checks of a condition, because a check may be expensive for the broker.
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.01, 0.1


def wait_until(
    condition: Callable[[], T | None],
    *,
    timeout_seconds: float = PATIENCE_SECONDS,
    telling: Callable[[], object] = str,
) -> T:
    """Return the first value of *condition* that is neither None nor False.

    Fails the test if there is no such value within *timeout_seconds*, with what *telling* says.
    """
    deadline = monotonic() + timeout_seconds
    pause_seconds = SHORTEST_PAUSE_SECONDS
    while True:
        value = condition()
        if value is not None and value is not False:
            return value
        if monotonic() > deadline:
            name = getattr(condition, "__qualname__", repr(condition))
            told = f"last value {value!r} {telling()}"
            pytest.fail(f"{name} not seen within {timeout_seconds} s; {told}")
        sleep(pause_seconds)
        pause_seconds = min(1.5 * pause_seconds, LONGEST_PAUSE_SECONDS)
