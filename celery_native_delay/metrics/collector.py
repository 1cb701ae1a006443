"""The metrics: names, types, labels, and where each number comes from."""

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
from ..rates.lines import RateLine
from ..worker.tally import BOUNDS
from .listening import Counts, Listener
from .polling import Poll, Reading

#: By their names in a tally.
_COUNTERS = {
    "matured": "Delayed messages that were due and reached a worker to be run.",
    "cancelled": "Delayed messages that were cancelled, and announced by a worker.",
    "expired": "Delayed messages that reached a worker after they had expired.",
}


class DelayCollector(Collector):
    """Collector of the last reading of *poll*, and of *counts*; does no I/O. *rated* are tasks.

    A number that is not known is left out, never 0: after a failure the state of the store,
    without records due times.
    """

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
        yield from _waiting(reading)
        yield from _lines(None if reading is None else reading.lines, self._rated)
        yield _gauge(
            "events_up",
            "Whether the events of workers are heard.",
            float(self._listener.hears),
        )
        yield from self._counted()

    def _counted(self) -> Iterator[Metric]:
        labels = ["queue_name"]
        counters = {
            name: CounterMetricFamily(f"celery_delay_{name}", text, labels=labels)
            for name, text in _COUNTERS.items()
        }
        lateness = HistogramMetricFamily(
            "celery_delay_lateness_seconds",
            "How long after they were due delayed tasks started.",
            labels=labels,
        )
        for queue, tally in sorted(self._counts.so_far().items()):
            for name, counter in counters.items():
                counter.add_metric([queue], getattr(tally, name))
            buckets = [
                ("+Inf" if bound == inf else str(bound), float(number))
                for bound, number in zip(BOUNDS, accumulate(tally.late), strict=True)
            ]
            lateness.add_metric([queue], buckets, tally.late_seconds)
        starts = CounterMetricFamily(
            "celery_delay_rate_starts",
            "Rated tasks whose turn came, and that a worker started.",
            labels=["task_name"],
        )
        for task, number in sorted(self._counts.starts().items()):
            starts.add_metric([task], number)
        yield from (*counters.values(), lateness, starts)


def _waiting(reading: Reading | None) -> Iterator[Metric]:
    backlog = None if reading is None else reading.backlog
    yield _gauge(
        "store_up",
        "Whether the broker said what waits when it was last asked.",
        None if reading is None else float(backlog is not None),
    )
    yield _gauge(
        "poll_duration_seconds",
        "How long the last look at broker and records took.",
        None if reading is None else reading.duration_seconds,
    )
    knows_due = backlog is not None and bool(backlog.records_answer)
    first_due = None if reading is None else reading.first_due
    yield _gauge(
        "records_up",
        "Whether the records answered; Redis keeps its own. Absent where none are kept.",
        None if backlog is None or backlog.records_answer is None else float(knows_due),
    )
    yield _gauge(
        "pending",
        "Messages that wait in the broker until they are due. What is cancelled or moved stays in "
        "RabbitMQ's levels until it was due, and is then dropped.",
        None if backlog is None else backlog.waiting,
    )
    yield _gauge(
        "records_messages",
        "Messages that wait by the records: without those that were cancelled or moved and "
        "stay in RabbitMQ's levels until they were due. Absent without records.",
        None if backlog is None else backlog.in_records,
    )
    levels = GaugeMetricFamily(
        "celery_delay_messages",
        "Messages in each delay level of RabbitMQ.",
        labels=["level", "ttl_seconds"],
    )
    for level in () if backlog is None else backlog.levels:
        levels.add_metric([level.name, _seconds(level.ttl_seconds)], level.waiting)
    yield levels
    yield _gauge(
        "unroutable_messages",
        "Parked messages: they were due, and their destination was not there.",
        None if backlog is None else backlog.parked,
    )
    yield _gauge(
        "next_due_timestamp_seconds",
        "When the first message is due. Absent if none waits, and on RabbitMQ without records.",
        first_due if knows_due else None,
    )
    yield _gauge(
        "overdue_seconds",
        "How long the first message has been due; 0 if none is. On Redis until it is promoted, by "
        "RabbitMQ's records until a worker receives it. Absent on RabbitMQ without records.",
        max(0, -(backlog.until_first_us or 0)) / 1_000_000 if backlog and knows_due else None,
    )


def _lines(lines: Sequence[RateLine] | None, rated: Iterable[str]) -> Iterator[Metric]:
    """Sums by task: keys are too many to be labels."""
    by_task: dict[str, list[RateLine]] = {}
    if lines is not None:
        by_task = {task: [] for task in rated}
        for line in lines:
            by_task.setdefault(line.task, []).append(line)
    labels = ["task_name"]
    waiting = GaugeMetricFamily(
        "celery_delay_rate_waiting",
        "Rated tasks that wait in the broker for their turn. Absent where no task is rated.",
        labels=labels,
    )
    count = GaugeMetricFamily(
        "celery_delay_rate_lines", "Lines of rated tasks, one for each key.", labels=labels
    )
    held = GaugeMetricFamily(
        "celery_delay_rate_lines_held",
        "Lines in which nothing may start for a while, as a task has raised RetryAfter.",
        labels=labels,
    )
    for task, its in sorted(by_task.items()):
        waiting.add_metric([task], sum(line.waiting for line in its))
        count.add_metric([task], len(its))
        held.add_metric([task], sum(line.held_until_us is not None for line in its))
    yield from (waiting, count, held)


def _gauge(name: str, documentation: str, value: float | None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"celery_delay_{name}", documentation, value=value)


def _seconds(seconds: float) -> str:
    """A label that is a number to people."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


POLL_SECONDS = 5.0


class Exposed:
    """Metrics that :func:`expose` has put into a registry; :meth:`close` takes them out."""

    def __init__(self, app: Celery, registry: CollectorRegistry, *, poll_seconds: float) -> None:
        rated = installed(app).settings().rate_by_task
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
        """Take the metrics out of the registry and end the threads."""
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
    """Put into *registry* what waits for *app*, and what workers with events on say came of it.

    Broker and records are read by a thread, so that collecting does no I/O; while they are away it
    says so, and goes on when they are back.

    Args:
        app: an installed app.
        poll_seconds: how often broker and records are read.

    Raises:
        SettingsError: the app is not installed, or its settings are wrong.
        ValueError: it is exposed in this registry already.
    """
    return Exposed(app, registry, poll_seconds=poll_seconds)
