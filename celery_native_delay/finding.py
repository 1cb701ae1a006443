"""Findings: faults of delays, certain or possible, each with a remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from .durations import duration

#: Workers take a message that waited for due up to a second early.
MAY_DIFFER_SECONDS = 1.0

#: The same for a clock that is told in whole seconds.
MAY_DIFFER_IN_WHOLE_SECONDS = 2.5

#: Levels of a finding. Delays do not work, or lose messages.
WRONG = "wrong"
#: It could not be looked at.
UNCHECKED = "not checked"
#: Delays work, and could do so more safely.
ADVICE = "advice"


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be, or that could not be looked at.

    *check* is what was looked at, such as "policies"; *level* is :data:`WRONG`, :data:`UNCHECKED`
    or :data:`ADVICE`; *problem* says what was found and *remedy* the way out, a line each.
    """

    check: str
    level: str
    problem: str
    remedy: str

    @classmethod
    def of_sentence(cls, check: str, level: str, sentence: str) -> Self:
        """The finding of a sentence "problem: remedy", as our errors say it."""
        problem, _, remedy = sentence.rpartition(": ")
        return cls(check, level, problem, remedy)

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


def clock_finding(
    whose: str,
    ahead_seconds: float,
    effect: str,
    *,
    may_differ_seconds: float = MAY_DIFFER_SECONDS,
    check: str = "clocks",
) -> Iterator[Finding]:
    """The fault of *whose* clock if it is *ahead_seconds* ahead of this machine's; below 0: behind.

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
