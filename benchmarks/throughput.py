"""Measure how fast one worker runs delayed tasks, compared with immediate tasks."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from time import sleep, time
from typing import Any

from celery import Celery
from matplotlib.figure import Figure

from benchmarks.apps import TASK, declare_for, make_app, running_worker, waiting_in
from benchmarks.charts import bars
from benchmarks.measuring import Bench, Result, Target, median
from celery_native_delay.bulk import bulk

TASKS = 15_000
ROUNDS = 3
COUNTDOWN_SECONDS = 12
"""A countdown longer than publishing all tasks, so that no task is due before the last publish."""
LABELS = {
    "now": "sent without delay",
    "ours": "ours, countdown=12",
    "moment": "ours, all due at one moment",
    "celery": "(b) Celery's own, countdown=12",
}


def run(bench: Bench) -> Result:
    count = bench.count(TASKS, at_least=300)
    rounds = ROUNDS if bench.scale >= 0.5 else 1
    rates: dict[str, list[float]] = {way: [] for way in LABELS}
    missing = dict.fromkeys(rates, 0)
    burst_seconds: list[float] = []
    for number in range(rounds):
        # Rotate the order by one each time, so that no way is always first or last.
        order = [*rates][number % len(rates) :] + [*rates][: number % len(rates)]
        for way in order:
            rate, arrived, run_count = measure(
                bench, way, count, f"throughput {number + 1}/{rounds}, {way}"
            )
            rates[way].append(rate)
            missing[way] += count - run_count
            if way == "moment":
                burst_seconds.append(arrived)
    result = Result(
        "Throughput of matured tasks",
        f"{count:,} tasks are in one quorum queue: sent without delay, or due after a delay. Then "
        f"a prefork worker with two processes starts. Tasks per second count from the first start "
        f"of a task to the last. {rounds} rounds, in alternating order. A countdown of whole "
        f"seconds takes two hops here. Tasks that are due at one moment have different delays, and "
        f"take about four hops.",
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
    result.targets = [
        Target("ours, countdown=12 : sent without delay", median(rates["ours"]) / base, "≥", 0.95)
    ]
    result.notes.append(
        f"The broker needs time for {count:,} messages that are due at one moment: the last one "
        f"reached the queue {median(burst_seconds):.1f} s after the due time (checked every "
        f"0.1 s)."
    )
    return result


def measure(bench: Bench, way: str, count: int, what: str) -> tuple[float, float, int]:
    """Measure one way of sending *count* tasks.

    Returns:
        Tasks per second, seconds from the last due time to the last task, and the number of tasks
        run.
    """
    method = "ours" if way in ("ours", "moment") else "celery"
    with bench.vhost() as url:
        app = make_app(method, url)
        declare_for(method, app)
        countdown = COUNTDOWN_SECONDS if bench.scale >= 0.5 else 3
        options: dict[str, Any] = {"countdown": countdown}
        if way == "now":
            options = {}
        if way == "moment":
            options = {"eta": datetime.fromtimestamp(time() + countdown, UTC)}
        publish(bench, app, count, f"{what}: publish", method, options)
        due = options["eta"].timestamp() if way == "moment" else time() + countdown
        bench.wait_for(
            f"{what}: mature",
            lambda: waiting_in(url),
            count,
            timeout_seconds=COUNTDOWN_SECONDS + 60,
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


def publish(
    bench: Bench, app: Celery, count: int, what: str, method: str, options: dict[str, Any]
) -> None:
    """Publish the tasks: with this package in bulk within a second, otherwise with Celery."""
    task = app.tasks[TASK]
    with bench.progress(what, count) as done, ExitStack() as stack:
        send = partial(task.apply_async, producer=stack.enter_context(app.producer_or_acquire()))
        if method == "ours":
            send = partial(stack.enter_context(bulk(app)).send, task)
        for index in range(count):
            send((index,), **options)
            done(index)


def draw(result: Result) -> Figure:
    return bars(
        "Tasks per second of one worker (median; the line: lowest to highest)",
        "tasks per second",
        [
            (label, middle, (low, high), label.startswith("ours"))
            for label, (low, middle, high) in result.series.items()
        ],
    )
