"""What is wrong with delays, or may be, and what to do about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

#: Levels of a finding. Delays do not work, or lose messages.
WRONG = "wrong"
#: Nobody could look.
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
        """Out of "problem: remedy", as our errors say it."""
        problem, _, remedy = sentence.rpartition(": ")
        return cls(check, level, problem, remedy)

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"
