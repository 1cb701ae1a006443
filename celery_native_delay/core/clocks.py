"""Clocks of two machines, and what it does if they differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from .durations import duration
from .finding import WRONG, Finding

#: Workers take a message that waited for due up to a second early.
MAY_DIFFER_SECONDS = 1.0

#: The same for a clock that is told in whole seconds.
MAY_DIFFER_IN_WHOLE_SECONDS = 2.5


def clock_finding(
    whose: str,
    ahead_seconds: float,
    effect: str,
    *,
    may_differ_seconds: float = MAY_DIFFER_SECONDS,
    check: str = "clocks",
) -> Iterator[Finding]:
    """What is wrong if *whose* clock is *ahead_seconds* ahead of this machine's; below 0: behind.

    *effect* is what that does to delays.
    """
    if abs(ahead_seconds) > may_differ_seconds:
        side = "ahead of" if ahead_seconds > 0 else "behind"
        yield Finding(
            check,
            WRONG,
            f"{whose} is {duration(abs(ahead_seconds))} {side} this machine's: {effect}",
            "have both follow one time server",
        )
