"""What 100,000 tasks that are due in an hour cost meanwhile."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from time import sleep, time
from typing import Any

from kombu.transport import native_delayed_delivery as celerys_own
from matplotlib.figure import Figure

from benchmarks.apps import LABELS, TASK, Worker, make_app, running_worker, waiting_in
from benchmarks.charts import bars_on, figure
from benchmarks.measuring import Bench, Result, Target, percentile
from celery_native_delay import DelaySettings
from celery_native_delay.transports.rabbitmq.topology import Topology

PENDING = 100_000
PENDING_CELERYS = 20_000
"""For (b), whose broker takes in about a thousand a second."""
HELD = 10_000
"""For (a): its worker takes in and keeps each of them."""
COUNTDOWN_SECONDS = 3600
WINDOW = 1_000
"""Publishes of ours for which one wait for confirms is made."""
PROBES = 300
PROBE_EVERY_SECONDS = 0.025
SETTLE_SECONDS = 3

MB = 1_000_000


@dataclass
class Cost:
    """What the pending tasks of one method did to worker, broker and immediate tasks."""

    asked: int
    count: int
    """How many of those asked for were seen to be taken in before we stopped waiting."""
    probes_missing: int
    """Immediate tasks that did not start within the time we waited; they are in no percentile."""
    publish_seconds: float
    worker_bytes: int
    broker_bytes: int
    idle_ms: list[float]
    """From the call to the start of an immediate task, with none pending, before and after."""
    busy_ms: list[float]
    """The same with all of them pending."""


def run(bench: Bench) -> Result:
    counts = {
        "ours": bench.count(PENDING, at_least=500),
        "celery": bench.count(PENDING_CELERYS, at_least=500),
        "held": bench.count(HELD, at_least=200),
    }
    costs = {method: measure(bench, method, count) for method, count in counts.items()}
    result = Result(
        "Tasks pending for an hour",
        f"{counts['ours']:,} tasks with countdown=3600 (for (b) {counts['celery']:,}, for (a) "
        f"{counts['held']:,}, as its worker takes in each) while a prefork worker with two "
        f"processes runs. Worker: growth of the resident memory of all its processes. Broker: "
        f"growth of what its runtime has allocated. p50 and p95: from the call of apply_async() to "
        f"the start of an immediate task, {bench.count(PROBES, at_least=20)} tasks 25 ms apart, "
        f"with none pending (before, and but for (a) again after a purge) and with all. Taken in: "
        f"by the broker, for (a) by the worker; ours confirmed in windows of {WINDOW:,}, (a) one "
        f"by one, (b) not.",
    )
    for method, cost in costs.items():
        result.rows.append(
            {
                "method": LABELS[method],
                "pending": cost.count,
                "taken in/s": cost.count / cost.publish_seconds,
                "worker MB": cost.worker_bytes / MB,
                "worker B/task": cost.worker_bytes / max(cost.count, 1),
                "broker B/task": cost.broker_bytes / max(cost.count, 1),
                "p50 ms, none": percentile(cost.idle_ms, 50),
                "p50 ms, all": percentile(cost.busy_ms, 50),
                "p95 ms, none": percentile(cost.idle_ms, 95),
                "p95 ms, all": percentile(cost.busy_ms, 95),
                "not started": cost.probes_missing,
            }
        )
        result.series[LABELS[method]] = {
            "count": cost.count,
            "worker_bytes": cost.worker_bytes,
            "idle": [percentile(cost.idle_ms, percent) for percent in (25, 50, 75)],
            "busy": [percentile(cost.busy_ms, percent) for percent in (25, 50, 75)],
        }
        if cost.count < cost.asked:
            result.notes.append(
                f"{LABELS[method]}: only {cost.count:,} of {cost.asked:,} tasks were taken in "
                f"before the wait for them was given up; the figures are for those."
            )
    ours, held = costs["ours"], costs["held"]
    result.targets = [
        Target(f"worker's growth, {ours.count:,} pending", ours.worker_bytes / MB, "<", 5, "MB"),
        Target(
            "median start of an immediate task, against the third quartile with none pending",
            percentile(ours.busy_ms, 50),
            "≤",
            percentile(ours.idle_ms, 75),
            "ms",
        ),
    ]
    per_task = held.worker_bytes / max(held.count, 1)
    result.notes.append(
        f"(a) holds each task in the worker: {per_task / 1000:.1f} kB per task. Extrapolated, not "
        f"measured: 100,000 tasks would take {per_task * 100_000 / MB:,.0f} MB of worker memory; "
        f"its prefetch count would have to grow with every held task, and RabbitMQ's ends at "
        f"65,535. Here its worker had room for all from the start, which is kinder to it than the "
        f"default (--prefetch-multiplier={HELD} instead of 4)."
    )
    return result


def measure(bench: Bench, method: str, count: int) -> Cost:
    what = f"pending, {method}"
    options = [f"--prefetch-multiplier={HELD}"] if method == "held" else []
    with bench.vhost() as url, running_worker(method, url, bench.folder, *options) as worker:
        app = make_app(method, url, confirm=method == "held")
        probes = Probes(bench, app, worker)
        probes.latencies_ms(f"{what}: warm up")
        idle_ms = probes.latencies_ms(f"{what}: immediate, none pending")
        broker_before, worker_before = allocated_bytes(bench), worker.resident_bytes()
        started, reached = time(), count
        publish(bench, app, count, what, windowed=method == "ours")
        if method == "held":
            reached = bench.wait_for(
                f"{what}: taken in", lambda: count - waiting_in(url), count, timeout_seconds=120
            )
        if method == "celery":
            # Unconfirmed, so the broker is still at it; what we send next would queue behind.
            reached = bench.wait_for(
                f"{what}: taken in",
                lambda: waiting_in(url, first_level(method)),
                count,
                timeout_seconds=300,
            )
        publish_seconds = time() - started
        sleep(SETTLE_SECONDS)
        worker_after, broker_after = worker.resident_bytes(), allocated_bytes(bench)
        busy_ms = probes.latencies_ms(f"{what}: immediate, all pending")
        if method != "held":
            # Again without them: what else the machine did meanwhile shows as a difference.
            with app.connection_for_write() as connection:
                connection.default_channel.queue_purge(first_level(method))
            sleep(SETTLE_SECONDS)
            idle_ms += probes.latencies_ms(f"{what}: immediate, none pending any more")
        app.close()
    return Cost(
        count,
        reached,
        probes.missing,
        publish_seconds,
        worker_after - worker_before,
        broker_after - broker_before,
        idle_ms,
        busy_ms,
    )


def publish(bench: Bench, app: Any, count: int, what: str, *, windowed: bool) -> None:
    """Publish *count* tasks due in an hour; *windowed*, with a wait for the confirms of each
    WINDOW of them, else unconfirmed as Celery does it."""
    send = app.tasks[TASK].apply_async
    with (
        app.producer_pool.acquire(block=True) as producer,
        bench.progress(f"{what}: publish", count) as done,
    ):
        for start in range(0, count, WINDOW):
            window = producer.channel.delays.one_confirm() if windowed else nullcontext()
            with window:
                for index in range(start, min(start + WINDOW, count)):
                    send((index,), countdown=COUNTDOWN_SECONDS, producer=producer)
            done(start)


def first_level(method: str) -> str:
    """The level queue where a task that is due in an hour waits first."""
    if method == "celery":
        return celerys_own.level_name(COUNTDOWN_SECONDS.bit_length() - 1)
    settings = DelaySettings()
    units = COUNTDOWN_SECONDS * 1000 // settings.resolution_ms
    return Topology(settings).path(units)[0].queue


def allocated_bytes(bench: Bench) -> int:
    """Memory that the broker's runtime has allocated, collected garbage left out."""
    collect = "[garbage_collect(P) || P <- processes()], erlang:memory(total)."
    return int(json.loads(bench.broker.rabbitmqctl("eval", collect)))


class Probes:
    """Immediate tasks, sent one at a time, and how soon each starts."""

    def __init__(self, bench: Bench, app: Any, worker: Worker) -> None:
        self._bench, self._app, self._worker = bench, app, worker
        self._sent: list[float] = []
        self.missing = 0

    def latencies_ms(self, what: str) -> list[float]:
        first = len(self._sent)
        count = self._bench.count(PROBES, at_least=20)
        with self._bench.progress(what, count) as done:
            for index in range(first, first + count):
                self._sent.append(time())
                self._app.tasks[TASK].apply_async((index,))
                sleep(PROBE_EVERY_SECONDS)
                done(index - first)
        self._bench.wait_for(what, self._worker.start_count, len(self._sent), timeout_seconds=30)
        latencies = [
            (at - self._sent[index]) * 1000
            for index, at in self._worker.starts()
            if first <= index < first + count
        ]
        self.missing += count - len(latencies)
        return latencies


def draw(result: Result) -> Figure:
    picture, (memory, start) = figure("Tasks pending for an hour", height=5, rows=2)
    memory.set_title("worker memory per pending task", fontsize=10, loc="left")
    bars_on(
        memory,
        "bytes per task",
        [
            (label, max(0.0, one["worker_bytes"] / max(one["count"], 1)), None, label == "ours")
            for label, one in result.series.items()
        ],
    )
    start.set_title("an immediate task starts after", fontsize=10, loc="left")
    bars_on(
        start,
        "milliseconds: median, with the middle half",
        [
            (f"{label}, {text}", one[key][1], (one[key][0], one[key][2]), label == "ours")
            for label, one in result.series.items()
            for key, text in (("idle", "none pending"), ("busy", f"{one['count']:,} pending"))
        ],
    )
    return picture
