"""The reports of Spark partitions to the driver: row counts, and tasks without a confirm."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Failure:
    """A row whose task the broker has not confirmed.

    *outcome* is "refused" (the broker refused the task, or the task cannot be delayed), "in doubt"
    (the broker may have received the task) or "unsent".
    """

    task_id: str
    outcome: str
    reason: str


@dataclass
class Receipt:
    """The numbers of sent and rejected rows of one partition, reported to the driver."""

    partition: int
    attempt: int
    """The id of the attempt of Spark's task, which no other attempt has."""
    rows: int = 0
    sent: int = 0
    confirmed: int = 0
    done: int = 0
    """The number of tasks that an earlier try has sent, and that have run; not sent again."""
    by_template: int = 0
    """The number of tasks that were sent as copies of an encoded message."""
    seconds: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)
    """The number of rejected rows by reason."""
    broken: str = ""
    """The reason why sending stopped before the last row; "" if all rows were handled."""
    last_eta: str = ""
    """The latest due time of the sent tasks, in ISO 8601."""
    sent_after_due: int = 0
    """The number of tasks that were sent after their due time."""
