"""Count the tasks and rejected rows of a ``FanOut`` before it sends tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from time import time_ns
from typing import Any

from pyspark.sql import functions as f

from ..now import moment
from .app import AppFacts
from .options import FanOutOptions

#: Tasks per second of one connection to RabbitMQ, which confirms each, on a machine of two cores.
#: A plan has no connection, and so measures nothing; ``send()`` does, and says what will be late.
USUAL_PER_SECOND = 4_700


@dataclass(frozen=True)
class Plan:
    """The counts and due times of the tasks that :meth:`FanOut.send` would send."""

    rows: int
    accepted: int
    rejects: dict[str, int]
    """The number of rows that would be rejected, by reason, most frequent first."""
    duplicates: int
    """The number of accepted rows that repeat the task id of another accepted row."""
    first_due: datetime | None
    last_due: datetime | None
    queues: dict[str, int]
    """The number of accepted tasks by queue."""
    send_seconds: float
    """The usual time to send all tasks, in seconds."""
    due_while_sending: int
    """The number of tasks that are due before all tasks are sent, and may run late."""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        rejected = self.rows - self.accepted
        yield f"{self.rows:,} rows: {self.accepted:,} to send, {rejected:,} rejected"
        for reason, count in self.rejects.items():
            yield f"  {count:>12,}  {reason}"
        if self.duplicates:
            yield f"  {self.duplicates:>12,}  have the task id of another row and run as well"
        if self.first_due is None or self.last_due is None:
            return
        yield f"due {self.first_due:%Y-%m-%d %H:%M:%SZ} to {self.last_due:%Y-%m-%d %H:%M:%SZ}"
        if self.due_while_sending:
            yield (
                f"warning: {self.due_while_sending:,} fall due within the {self.send_seconds:,.1f} "
                f"s that sending takes at {self.accepted / self.send_seconds:,.0f} tasks/s; those "
                f"sent after they are due will be late"
            )
        for queue, count in sorted(self.queues.items()):
            yield f"queue {queue}: {count:,}"


def make_plan(encoded: Any, facts: AppFacts, options: FanOutOptions, senders: int) -> Plan:
    """Count the tasks that *senders* connections would send; Spark caches *encoded* meanwhile."""
    kept = encoded.select("task_id", "due_us", "queue", "error").persist()
    accepted = kept.where("error is null")
    queue = f.coalesce("queue", f.lit(facts.route)).alias("queue")
    try:
        rejects = dict(kept.where("error is not null").groupBy("error").count().collect())
        queues = dict(accepted.groupBy(queue).count().collect())
        ids, first_us, last_us = accepted.agg(
            f.count_distinct("task_id"), f.min("due_us"), f.max("due_us")
        ).first()
        count = sum(queues.values())
        rate = senders * USUAL_PER_SECOND
        send_seconds = count / min(rate, options.max_rate or rate)
        ends_us = time_ns() // 1000 + round(send_seconds * 1_000_000)
        due_meanwhile = f.col("due_us").between(options.now_us + 1, ends_us)
        due_while_sending = accepted.where(due_meanwhile).count()
    finally:
        kept.unpersist()
    first_due, last_due = (None if us is None else moment(us) for us in (first_us, last_us))
    return Plan(
        rows=count + sum(rejects.values()),
        accepted=count,
        rejects=dict(sorted(rejects.items(), key=lambda one: -one[1])),
        duplicates=count - ids,
        first_due=first_due,
        last_due=last_due,
        queues=queues,
        send_seconds=send_seconds,
        due_while_sending=due_while_sending,
    )
