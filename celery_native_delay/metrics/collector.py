"""The Prometheus metrics: names, types, labels and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import inf

from celery import Celery
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..app.installation import installed
from ..app.schedules import Scheduled
from ..rates.line import RateLine
from ..transports.interface import Backlog
from ..worker.tally import BOUNDS, bucket
from .threads import Counts, Listener, Poll, Reading

#: The help text of each gauge without labels, by the gauge's name.
_GAUGES = {
    "broker_up": "1 if the broker answered when it was last asked, else 0.",
    "poll_duration_seconds": "Seconds that the last look at broker and store took.",
    "store_up": "1 if the store answered, else 0. Absent without a store.",
    "pending": "Messages that wait, in the broker and in the store.",
    "store_messages": ("Tasks that wait in the store. Absent without a store."),
    "parked_messages": "Parked messages: they were due, and no queue was bound for them.",
    "next_due_timestamp_seconds": (
        "Due time of the first waiting message. Absent if none waits or it is unknown."
    ),
    "overdue_seconds": (
        "Seconds for which the first waiting message has been due; 0 if none is. Absent on "
        "RabbitMQ without a store."
    ),
    "events_up": "1 if the workers' events are received, else 0.",
}

#: The help text of each counter, by the counter's name in a worker's event.
_COUNTERS = {
    "matured": "Delayed messages that a worker received to run them.",
    "cancelled": "Delayed messages that were cancelled, and that a worker announced.",
    "expired": "Delayed messages that a worker received after they had expired.",
}


class DelayCollector(Collector):
    """Prometheus collector of values that two threads read from the broker and the workers."""

    def __init__(
        self, poll: Poll, counts: Counts, listener: Listener, rated: Iterable[str] = ()
    ) -> None:
        self._poll = poll
        self._counts = counts
        self._listener = listener
        self._rated = tuple(rated)

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        reading = self._poll.reading()
        values = _values(reading) | {"events_up": float(self._listener.is_connected)}
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"celery_delay_{name}", text, value=values.get(name))
        yield _levels(None if reading is None else reading.backlog)
        yield from _lines(None if reading is None else reading.lines, self._rated)
        yield from _schedules((reading and reading.entries) or ())
        held = _gauge("held", "Tasks that a hold keeps waiting; 0 for a drop.", "hold", "mode")
        for hold in () if reading is None else reading.holds:
            held.add_metric([hold.name, hold.mode], hold.held)
        yield held
        yield from self._counted()

    def _counted(self) -> Iterator[Metric]:
        labels = ["queue_name"]
        counters = {
            name: CounterMetricFamily(f"celery_delay_{name}", text, labels=labels)
            for name, text in _COUNTERS.items()
        }
        lateness = HistogramMetricFamily(
            "celery_delay_lateness_seconds",
            "Seconds between the due time and the start of delayed tasks.",
            labels=labels,
        )
        for queue, tally in sorted(self._counts.so_far().items()):
            for name, counter in counters.items():
                counter.add_metric([queue], tally[name])
            late = accumulate(float(tally[bucket(bound)]) for bound in BOUNDS)
            names = ["+Inf" if bound == inf else str(bound) for bound in BOUNDS]
            buckets = list(zip(names, late, strict=True))
            lateness.add_metric([queue], buckets, tally["late_us"] / 1_000_000)
        starts = CounterMetricFamily(
            "celery_delay_rate_starts",
            "Rate-limited tasks that a worker started.",
            labels=["task_name"],
        )
        for task, number in sorted(self._counts.starts().items()):
            starts.add_metric([task], number)
        yield from (*counters.values(), lateness, starts)


def _values(reading: Reading | None) -> dict[str, float | None]:
    """Return the values of ``_GAUGES`` that *reading* has; unknown values are None or left out."""
    if reading is None:
        return {}
    backlog = reading.backlog
    values: dict[str, float | None] = {
        "broker_up": float(backlog is not None),
        "poll_duration_seconds": reading.duration_seconds,
    }
    if backlog is None:
        return values
    values |= {
        "pending": backlog.waiting,
        "store_messages": backlog.in_store,
        "parked_messages": backlog.parked,
    }
    if backlog.store_answers is not None:
        values["store_up"] = float(backlog.store_answers)
    if backlog.store_answers:
        values["next_due_timestamp_seconds"] = reading.first_due
        values["overdue_seconds"] = max(0, -(backlog.until_first_us or 0)) / 1_000_000
    return values


def _levels(backlog: Backlog | None) -> Metric:
    levels = _gauge("messages", "Messages in each delay level of RabbitMQ.", "level", "ttl_seconds")
    for level in () if backlog is None else backlog.levels:
        levels.add_metric([level.name, _seconds(level.ttl_seconds)], level.waiting)
    return levels


def _lines(lines: Sequence[RateLine] | None, rated: Iterable[str]) -> Iterator[Metric]:
    """Yield the metrics of rate-limited tasks (*rated*), with the task name as label."""
    by_task: dict[str, list[RateLine]] = {}
    if lines is not None:
        by_task = {task: [] for task in rated}
        for line in lines:
            by_task.setdefault(line.task, []).append(line)
    waiting = _gauge(
        "rate_waiting",
        "Rate-limited tasks that wait in the broker. Absent if no task has a rate.",
        "task_name",
    )
    count = _gauge("rate_lines", "Lines of rate-limited tasks.", "task_name")
    held = _gauge(
        "rate_lines_held",
        "Lines whose tasks wait because one of them has raised RetryAfter.",
        "task_name",
    )
    for task, its in sorted(by_task.items()):
        waiting.add_metric([task], sum(line.waiting for line in its))
        count.add_metric([task], len(its))
        held.add_metric([task], sum(line.held_until_us is not None for line in its))
    yield from (waiting, count, held)


def _schedules(entries: Sequence[Scheduled]) -> Iterator[Metric]:
    """Yield the metrics of schedule entries that have a next due time."""
    next_due = _gauge(
        "schedule_next_due_timestamp_seconds",
        "Due time of the next occurrence of a schedule entry. Absent if schedules are off.",
        "entry",
    )
    late = _gauge(
        "schedule_late_seconds",
        "Seconds for which the next occurrence of a schedule entry has been due; 0 if it is not.",
        "entry",
    )
    for entry in entries:
        if entry.next_due is not None:
            next_due.add_metric([entry.name], entry.next_due.timestamp())
            late.add_metric([entry.name], entry.late_seconds)
    yield from (next_due, late)


def _gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"celery_delay_{name}", documentation, labels=labels)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


POLL_SECONDS = 5.0


class Exposed:
    """The registered Prometheus metrics of an app; :meth:`close` removes the metrics."""

    def __init__(self, app: Celery, registry: CollectorRegistry, *, poll_seconds: float) -> None:
        rated = installed(app).settings().rates_by_task
        self.counts = Counts(app.amqp.queues, rated)
        self._registry = registry
        poll = Poll(app, every_seconds=poll_seconds)
        listener = Listener(app, self.counts)
        self._threads: list[Poll | Listener] = [poll, listener]
        self._collector = DelayCollector(poll, self.counts, listener, rated)
        registry.register(self._collector)
        for thread in self._threads:
            thread.start()

    def close(self, *, timeout_seconds: float = 5.0) -> None:
        """Remove the metrics from the registry, and stop the threads of the collector."""
        self._registry.unregister(self._collector)
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join(timeout_seconds)


def expose(
    app: Celery,
    registry: CollectorRegistry = REGISTRY,
    *,
    poll_seconds: float = POLL_SECONDS,
) -> Exposed:
    """Register Prometheus metrics of the app's delayed tasks.

    A thread reads the values from the broker and the stored state of tasks, so that a scrape does
    no I/O. Lateness and counters need workers with events on (``-E``).

    Args:
        app: a Celery app with ``install(app)``.
        registry: the Prometheus registry; ``prometheus_client.REGISTRY`` by default.
        poll_seconds: seconds between two reads of the broker and the stored state.

    Raises:
        SettingsError: ``install(app)`` was not called, or the app's settings are wrong.
        ValueError: the registry already has these metrics.
    """
    return Exposed(app, registry, poll_seconds=poll_seconds)
