"""Findings: problems that a check has found, and checks that could not run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from .durations import duration

#: Seconds by which clocks may differ: workers accept a delayed message up to a second early.
MAY_DIFFER_SECONDS = 1.0

#: Level of a finding: delays do not work, or lose messages.
WRONG = "wrong"
#: Level of a finding: the check could not run.
UNCHECKED = "not checked"
#: Level of a finding: delays work, and could be made safer.
ADVICE = "advice"


@dataclass(frozen=True)
class Finding:
    """A problem that a check has found, or a check that could not run.

    *check* names the check, such as "policies". *level* is :data:`WRONG`, :data:`UNCHECKED` or
    :data:`ADVICE`. *problem* and *remedy* are one line each.
    """

    check: str
    level: str
    problem: str
    remedy: str

    @classmethod
    def of_sentence(cls, check: str, level: str, sentence: str) -> Self:
        """Make a finding from a text of the form "problem: remedy"."""
        problem, _, remedy = sentence.rpartition(": ")
        return cls(check, level, problem, remedy)

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


def clock_finding(
    whose: str,
    ahead_seconds: float,
    effect: str,
    *,
    check: str = "clocks",
) -> Iterator[Finding]:
    """Yield a problem if a server's clock and this machine's clock differ by over a second.

    The problem's text begins with *whose* (the clock's name), and ends with *effect* (the
    consequence for delayed tasks).
    """
    if abs(ahead_seconds) > MAY_DIFFER_SECONDS:
        side = "ahead of" if ahead_seconds > 0 else "behind"
        yield Finding(
            check,
            WRONG,
            f"{whose} is {duration(abs(ahead_seconds))} {side} this machine's: {effect}",
            "have both follow one time server",
        )
