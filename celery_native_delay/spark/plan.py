"""The plan of a fan-out: counted by Spark, told to a person."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from time import time_ns
from typing import Any

from pyspark.sql import functions as f

from ..transports.rabbitmq.topology import Topology
from .app import AppFacts
from .options import EPOCH, FanOutOptions

#: Tasks per second that no connection exceeds, as far as was ever measured.
FASTEST_PER_SECOND = 25_000

#: Seconds that a bar of the histogram may stand for: the first that makes few enough of them.
_BAR_SECONDS = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 86_400, 7 * 86_400, 30 * 86_400)
_MOST_BARS = 40
_BAR_CHARACTERS = 40


@dataclass(frozen=True)
class Bar:
    """Tasks of one *queue* that fall due from *start* on, until the next bar."""

    start: datetime
    queue: str
    count: int


@dataclass(frozen=True)
class Plan:
    """Counts and times of a fan-out before it is sent; the broker has not been asked."""

    rows: int
    accepted: int
    rejects: dict[str, int]
    """Rows that would not be sent, by reason; most frequent first."""
    duplicates: int
    """Accepted rows whose id another one has, too, beyond the first of each."""
    first_due: datetime | None
    last_due: datetime | None
    body_bytes: int
    largest_body_bytes: int
    peak_count: int
    """Tasks due in the busiest second."""
    peak_at: datetime | None
    bar_seconds: int
    histogram: list[Bar] = field(repr=False)
    send_seconds: float
    """Seconds that sending takes at least: by *max_rate*, or what so many connections can do."""
    due_while_sending: int
    """Tasks that fall due before it can end, if it begins now: those sent last are late."""
    levels: dict[str, int] = field(repr=False)
    """Messages that would pass each level queue of RabbitMQ; empty on other brokers."""

    @property
    def hops(self) -> int:
        """Number of waits of all messages together."""
        return sum(self.levels.values())

    @property
    def queues(self) -> dict[str, int]:
        """Accepted tasks by queue."""
        found: dict[str, int] = {}
        for bar in self.histogram:
            found[bar.queue] = found.get(bar.queue, 0) + bar.count
        return found

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        rejected = self.rows - self.accepted
        yield f"{self.rows:,} rows: {self.accepted:,} to send, {rejected:,} rejected"
        for reason, count in self.rejects.items():
            yield f"  {count:>12,}  {reason}"
        if self.duplicates:
            yield f"  {self.duplicates:>12,}  have the id of another row and will run once more"
        if self.first_due is None or self.last_due is None:
            return
        yield f"due {_time(self.first_due)} to {_time(self.last_due)}"
        if self.due_while_sending:
            yield (
                f"warning: {self.due_while_sending:,} fall due within the {self.send_seconds:,.1f} "
                f"s that sending takes at least; those that are sent after that are late"
            )
        yield f"busiest second {_time(self.peak_at)}: {self.peak_count:,}"
        yield f"arguments {self.body_bytes:,} bytes, at most {self.largest_body_bytes:,} in a task"
        for queue, count in sorted(self.queues.items()):
            yield f"queue {queue}: {count:,}"
        by_start: dict[datetime, int] = {}
        for bar in self.histogram:
            by_start[bar.start] = by_start.get(bar.start, 0) + bar.count
        most = max(by_start.values())
        for start in sorted(by_start):
            length = -(-by_start[start] * _BAR_CHARACTERS // most)
            yield f"{_time(start)}  {'█' * length:<{_BAR_CHARACTERS}} {by_start[start]:>12,}"
        if self.levels:
            yield f"delay levels: {self.hops / self.accepted:.1f} hops per task; busiest:"
            for name, count in sorted(self.levels.items(), key=lambda one: -one[1])[:5]:
                yield f"  {count:>12,}  {name}"


def make_plan(encoded: Any, facts: AppFacts, options: FanOutOptions) -> Plan:
    """Count *encoded* in four jobs: rejects, the whole, the busiest second, the histogram.

    A fifth counts what falls due while it is sent, if anything does. The first encodes the rows,
    the others find them in Spark's cache.
    """
    body_bytes = f.octet_length("body").alias("body_bytes")
    kept = encoded.select("task_id", "due_us", body_bytes, "queue", "error").persist()
    try:
        return _counted(kept, facts, options)
    finally:
        kept.unpersist()


def _counted(encoded: Any, facts: AppFacts, options: FanOutOptions) -> Plan:
    fine = f.col("error").isNull()
    rejects = {
        row["error"]: row["count"]
        for row in encoded.where(~fine).groupBy("error").count().collect()
    }
    accepted = encoded.where(fine)
    steps = _steps(facts)
    unit_us = facts.delay_settings.resolution_ms * 1000
    units = f.ceil((f.col("due_us") - options.now_us) / unit_us).cast("long")
    total = accepted.agg(
        f.count(f.lit(1)).alias("count"),
        f.count_distinct("task_id").alias("ids"),
        f.min("due_us").alias("first"),
        f.max("due_us").alias("last"),
        f.sum("body_bytes").alias("bytes"),
        f.max("body_bytes").alias("largest"),
        *(
            f.count_if(f.shiftright(units, shift).bitwiseAND(mask) == value).alias(f"step{index}")
            for index, (_, shift, mask, value) in enumerate(steps)
        ),
    ).first()
    count = total["count"]
    rate = options.connections * FASTEST_PER_SECOND
    send_seconds = count / min(rate, options.max_rate or rate)
    peak = _peak(accepted)
    bar_seconds = _bar_seconds(total["first"], total["last"]) if count else 1
    return Plan(
        rows=count + sum(rejects.values()),
        accepted=count,
        rejects=dict(sorted(rejects.items(), key=lambda one: -one[1])),
        duplicates=count - total["ids"],
        first_due=_datetime(total["first"]),
        last_due=_datetime(total["last"]),
        body_bytes=total["bytes"] or 0,
        largest_body_bytes=total["largest"] or 0,
        peak_count=peak["count"] if peak else 0,
        peak_at=_datetime(peak["second"] * 1_000_000) if peak else None,
        bar_seconds=bar_seconds,
        histogram=_histogram(accepted, facts, bar_seconds),
        send_seconds=send_seconds,
        due_while_sending=_due_while_sending(accepted, total["first"], send_seconds, options),
        levels={name: total[f"step{i}"] for i, (name, *_) in enumerate(steps) if total[f"step{i}"]},
    )


def _due_while_sending(
    accepted: Any, first_us: int | None, send_seconds: float, options: FanOutOptions
) -> int:
    """Number of tasks that fall due within *send_seconds* and were not due to begin with."""
    ends_us = time_ns() // 1000 + round(send_seconds * 1_000_000)
    if first_us is None or first_us > ends_us:
        return 0
    due = f.col("due_us")
    return int(accepted.where((due > options.now_us) & (due <= ends_us)).count())


def _steps(facts: AppFacts) -> list[tuple[str, int, int, int]]:
    """Each level queue with the bits of a delay, and their value, that lead through it."""
    if not facts.has_levels:
        return []
    topology = Topology(facts.delay_settings)
    return [
        (topology.level_queue(units), level.lowest, (1 << level.width) - 1, units >> level.lowest)
        for level in topology.levels
        for units in level.steps
    ]


def _peak(accepted: Any) -> Any:
    seconds = accepted.groupBy(f.expr("due_us div 1000000").alias("second")).count()
    return seconds.orderBy(f.desc("count"), "second").first()


def _histogram(accepted: Any, facts: AppFacts, bar_seconds: int) -> list[Bar]:
    bar = f.expr(f"due_us div {bar_seconds * 1_000_000} * {bar_seconds * 1_000_000}")
    queue = f.coalesce("queue", f.lit(facts.route))
    rows = accepted.groupBy(bar.alias("start"), queue.alias("queue")).count().collect()
    bars = [Bar(_time_of(row["start"]), row["queue"], row["count"]) for row in rows]
    return sorted(bars, key=lambda one: (one.start, one.queue))


def _bar_seconds(first_us: int, last_us: int) -> int:
    seconds = (last_us - first_us) / 1_000_000
    return next((n for n in _BAR_SECONDS if seconds / n <= _MOST_BARS), 365 * 86_400)


def _time_of(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


def _datetime(us: int | None) -> datetime | None:
    return None if us is None else _time_of(us)


def _time(at: datetime | None) -> str:
    return "" if at is None else at.strftime("%Y-%m-%d %H:%M:%SZ")
