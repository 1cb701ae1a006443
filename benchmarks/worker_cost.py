"""Measure the CPU time of a worker's main process per task: plain Celery, and with this package."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from typing import Any

from celery import Celery
from matplotlib.figure import Figure

from benchmarks.apps import QUEUE, TASK, Worker, make_app, running_worker, send_all, waiting_in
from benchmarks.charts import quartile_bars
from benchmarks.measuring import Bench, Result, Target, median, quartiles
from celery_native_delay.bulk import bulk

ROUNDS = 6
TASKS = 3000
"""The number of tasks of one variant in one round."""
DELAY_SECONDS = (20.0, 40.0)
"""The shortest and the longest delay. Such a task passes about three delay queues."""
SETTLE_SECONDS = 0.5

PLAIN, NOW, DELAYED = "plain Celery, immediate", "ours, immediate", "ours, delayed"


@dataclass
class Variant:
    """A worker, and the app that publishes tasks for it."""

    app: Celery
    url: str
    worker: Worker
    cpu_us: list[float] = field(default_factory=list)
    """The CPU time per task, by round."""

    def consume(self, on: bool) -> None:
        """Let the worker consume from its queue, or stop it from that."""
        change = self.app.control.add_consumer if on else self.app.control.cancel_consumer
        if not change(QUEUE, reply=True, timeout=60, limit=1):
            raise RuntimeError(f"expected an answer of the worker of {self.url}, got none")

    def drain(self, bench: Bench, what: str, total: int) -> None:
        """Wait until *total* tasks are in the queue, then measure the worker that runs them."""
        ready = bench.wait_for(
            f"{what}: ready", lambda: waiting_in(self.url), total, timeout_seconds=180
        )
        started, cpu = self.worker.start_count(), own_cpu_seconds(self.worker.pid)
        self.consume(True)
        ran = bench.wait_for(
            f"{what}: run", lambda: self.worker.start_count() - started, total, timeout_seconds=180
        )
        sleep(SETTLE_SECONDS)  # the last results and acknowledgements
        if (ready, ran) != (total, total):
            raise RuntimeError(f"expected {total} tasks, got {ready} in the queue, {ran} started")
        self.cpu_us.append((own_cpu_seconds(self.worker.pid) - cpu) / total * 1e6)
        self.consume(False)


def run(bench: Bench) -> Result:
    rounds, total = bench.count(ROUNDS, at_least=2), bench.count(TASKS)
    order = random.Random(1)
    with variants(bench) as ways:
        for number in range(rounds + 1):  # the first round warms up
            send_delayed(ways[DELAYED].app, total)
            # The delayed tasks wait while the others run.
            for label in [*order.sample([PLAIN, NOW], 2), DELAYED]:
                way = ways[label]
                if label != DELAYED:
                    send_all(way.app, TASK, range(total))
                way.drain(bench, f"worker-cost {number}/{rounds}, {label}", total)
        found = {label: way.cpu_us[1:] for label, way in ways.items()}
    shortest, longest = DELAY_SECONDS
    result = Result(
        "The worker's own cost",
        f"CPU time (user and system) of the main process of a prefork worker with two pool "
        f"processes, per task with one argument, on RabbitMQ. {rounds} rounds of {total} tasks "
        f"per variant, alternating; each variant has its own worker and virtual host. A round's "
        f"tasks are in the queue before the worker consumes. The delayed tasks waited {shortest:g} "
        f"to {longest:g} s, in about three delay queues. Medians; the brackets have the middle "
        f"half of the ratios of single rounds.",
    )
    for label, cpu_us in found.items():
        row: dict[str, Any] = {"task": label, "CPU µs": median(cpu_us)}
        for what, base in (("this : plain", PLAIN), ("this : ours, immediate", NOW)):
            low, middle, high = ratios(cpu_us, found[base])
            row[what] = "1" if label == base else f"{middle:.3f} ({low:.2f}-{high:.2f})"
        result.rows.append(row)
        result.series[label] = quartiles(cpu_us)
    for what, label, base, limit in (
        ("immediate task, ours : plain Celery", NOW, PLAIN, 1.03),
        ("delayed : immediate task", DELAYED, NOW, 1.12),
    ):
        _, ratio, _ = ratios(found[label], found[base])
        result.targets.append(Target(what, ratio, "≤", limit))
    return result


@contextmanager
def variants(bench: Bench) -> Iterator[dict[str, Variant]]:
    """Yield a worker for each variant, all on the same broker."""
    found = {}
    with ExitStack() as stack:
        for label in (PLAIN, NOW, DELAYED):
            url = stack.enter_context(bench.vhost())
            method = "celery" if label == PLAIN else "ours"
            app = make_app(method, url)
            stack.callback(app.close)
            options = ("--without-gossip", "--without-mingle")
            worker = stack.enter_context(running_worker(method, url, bench.folder, *options))
            found[label] = Variant(app, url, worker)
            found[label].consume(False)
        yield found


def send_delayed(app: Celery, total: int) -> None:
    draw = random.Random(2)
    with bulk(app) as batch:
        for index in range(total):
            batch.send(app.tasks[TASK], (index,), countdown=draw.uniform(*DELAY_SECONDS))


def own_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process's threads, without its child processes; Linux only."""
    nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has just ended
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def ratios(these: list[float], others: list[float]) -> list[float]:
    """Return the quartiles of the ratios of rounds: neighbours in time had the same load."""
    return quartiles(this / other for this, other in zip(these, others, strict=True))


def draw(result: Result) -> Figure:
    title = "CPU time of a worker's main process per task"
    return quartile_bars(title, "microseconds", result.series, lambda label: label[:4] == "ours")
