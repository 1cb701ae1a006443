"""The account that each task of a fan-out gives of its rows, as it travels to the driver."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Failure:
    """A row that the broker has not confirmed.

    *outcome* is "refused" (by the broker, or it cannot wait), "in doubt" (it may have arrived) or
    "unsent".
    """

    task_id: str
    outcome: str
    reason: str


@dataclass
class Receipt:
    """The account of one partition's rows, in the attempt that counts."""

    partition: int
    attempt: int
    rows: int = 0
    ids: int = 0
    """Sum of the CRC-32 of all task ids."""
    sent: int = 0
    confirmed: int = 0
    by_template: int = 0
    seconds: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)
    """Rows that were never to be sent, by reason."""
    broken: str = ""
    """Reason why the sending ended early; "" if it did not."""
    fence: str = ""
    """Stamp that all of its messages carry, if the run is fenced."""
    last_eta: str = ""
    """The latest due time that was sent."""
    sent_after_due: int = 0
    """Number of tasks that had fallen due before they were sent."""
