"""How fast one worker runs tasks that have waited, against tasks that have not."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from time import sleep, time

from matplotlib.figure import Figure

from benchmarks.apps import TASK, declare_for, make_app, running_worker, waiting_in
from benchmarks.charts import bars
from benchmarks.measuring import Bench, Result, Target, median

TASKS = 10_000
ROUNDS = 3
DUE_AFTER_SECONDS = 12
"""All are due at the same moment, which is after the last one is published."""
WINDOW = 1_000

LABELS = {
    "now": "sent without delay",
    "ours": "ours, matured",
    "celery": "(b) Celery's own, matured",
}


def run(bench: Bench) -> Result:
    count = bench.count(TASKS, at_least=300)
    rounds = ROUNDS if bench.scale >= 0.5 else 1
    rates: dict[str, list[float]] = {"now": [], "ours": [], "celery": []}
    missing = dict.fromkeys(rates, 0)
    burst_seconds: list[float] = []
    for number in range(rounds):
        # Turned by one each time: none is always first or last.
        order = [*rates][number % 3 :] + [*rates][: number % 3]
        for way in order:
            rate, arrived, run_count = measure(
                bench, way, count, f"throughput {number + 1}/{rounds}, {way}"
            )
            rates[way].append(rate)
            missing[way] += count - run_count
            if way == "ours":
                burst_seconds.append(arrived)
    result = Result(
        "Throughput of matured tasks",
        f"{count:,} tasks wait in the same quorum queue: sent without delay, or all due at one "
        f"moment and matured. Then one prefork worker with two processes starts; tasks per second "
        f"from its first start of a task to its last. {rounds} rounds in turning order.",
    )
    base = median(rates["now"])
    for way, values in rates.items():
        result.rows.append(
            {
                "tasks": LABELS[way],
                "tasks/s, median": median(values),
                "lowest": min(values),
                "highest": max(values),
                "this : immediate": median(values) / base,
                "not run": missing[way],
            }
        )
        result.series[LABELS[way]] = [min(values), median(values), max(values)]
    result.targets = [Target("ours : sent without delay", median(rates["ours"]) / base, "≥", 0.95)]
    result.notes.append(
        f"The broker itself needs a moment for {count:,} messages that are due at once: the last "
        f"reached the queue {median(burst_seconds):.1f} s after the due time (looked at every "
        f"0.1 s)."
    )
    return result


def measure(bench: Bench, way: str, count: int, what: str) -> tuple[float, float, int]:
    """Tasks per second, seconds after the due time until all were in the queue, and tasks run."""
    method = "ours" if way == "ours" else "celery"
    with bench.vhost() as url:
        app = make_app(method, url)
        declare_for(method, app)
        due = time() + (DUE_AFTER_SECONDS if bench.scale >= 0.5 else 3)
        eta = None if way == "now" else datetime.fromtimestamp(due, UTC)
        with (
            app.producer_pool.acquire(block=True) as producer,
            bench.progress(f"{what}: publish", count) as done,
        ):
            for start in range(0, count, WINDOW):
                window = producer.channel.delays.one_confirm if way == "ours" else nullcontext
                with window():
                    for index in range(start, min(start + WINDOW, count)):
                        app.tasks[TASK].apply_async((index,), eta=eta, producer=producer)
                done(start)
        bench.wait_for(
            f"{what}: mature",
            lambda: waiting_in(url),
            count,
            timeout_seconds=DUE_AFTER_SECONDS + 60,
            every_seconds=0.1,
        )
        arrived = time() - due
        if way == "celery":
            sleep(max(0.0, due + 1 - time()))  # it came up to a second early
        with running_worker(method, url, bench.folder) as worker:
            bench.wait_for(f"{what}: run", worker.start_count, count, timeout_seconds=120)
            starts = [at for _, at in worker.starts()]
        app.close()
    if len(starts) < 2:
        return 0.0, arrived, len(starts)
    return (len(starts) - 1) / (max(starts) - min(starts)), arrived, len(starts)


def draw(result: Result) -> Figure:
    return bars(
        "Tasks per second through one worker: median, lowest and highest",
        "tasks per second",
        [
            (label, middle, (low, high), label.startswith("ours"))
            for label, (low, middle, high) in result.series.items()
        ],
    )
