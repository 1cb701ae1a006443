"""The report of each Spark task of a fan-out to the driver."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Failure:
    """A row that the broker has not confirmed.

    *outcome* is "refused" (by the broker, or because it cannot be delayed), "in doubt" (the broker
    may have it) or "unsent".
    """

    task_id: str
    outcome: str
    reason: str


@dataclass
class Receipt:
    """The counts of one partition, as its successful Spark task reports them."""

    partition: int
    attempt: int
    rows: int = 0
    ids: int = 0
    """The sum of the CRC-32 of all task ids."""
    sent: int = 0
    confirmed: int = 0
    by_template: int = 0
    seconds: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)
    """Rows that were rejected, by reason."""
    broken: str = ""
    """The reason why sending ended early; "" if it did not."""
    fence: str = ""
    """The stamp of its messages if the run is fenced."""
    last_eta: str = ""
    """The latest due time of its tasks, in ISO 8601."""
    sent_after_due: int = 0
    """Tasks that were sent after they were due."""
