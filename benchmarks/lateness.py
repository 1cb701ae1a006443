"""How late delayed tasks are: at the destination queue, and when a worker starts them."""

from __future__ import annotations

import random
from time import monotonic, sleep, time
from typing import Any

from matplotlib.figure import Figure

from benchmarks.apps import LABELS, TASK, Arrivals, declare_for, make_app, running_worker
from benchmarks.charts import GREY, OTHERS, OURS, curves_on, figure
from benchmarks.measuring import Bench, Result, Target, curve, lateness_columns, percentile

TASKS = 2_000
PER_SECOND = 200
"""Of publishes: a confirmed one takes 2 ms."""
LONGEST_SECONDS = 30
WARM_UP = 20
GRACE_SECONDS = 10
"""How much later than the last due time we stop waiting."""

WHOLE, FRACTIONAL = "whole seconds", "fractional"
QUEUE_SIDE, TASK_SIDE = "queue", "task"

#: (countdowns, side, method) in the order they are measured. On the queue side there is nothing
#: to compare with (a), whose messages are in the queue from the first moment on.
RUNS = [
    (WHOLE, QUEUE_SIDE, "ours"),
    (WHOLE, QUEUE_SIDE, "celery"),
    (WHOLE, TASK_SIDE, "ours"),
    (WHOLE, TASK_SIDE, "celery"),
    (WHOLE, TASK_SIDE, "held"),
    (FRACTIONAL, QUEUE_SIDE, "ours"),
    (FRACTIONAL, QUEUE_SIDE, "celery"),
    (FRACTIONAL, TASK_SIDE, "ours"),
    (FRACTIONAL, TASK_SIDE, "celery"),
    (FRACTIONAL, TASK_SIDE, "held"),
]


def run(bench: Bench) -> Result:
    longest = LONGEST_SECONDS if bench.scale >= 0.5 else 5
    counts = {WHOLE: bench.count(TASKS, at_least=20), FRACTIONAL: bench.count(1_000, at_least=20)}
    result = Result(
        "Lateness",
        f"{counts[WHOLE]:,} tasks with random countdowns of 1-{longest} whole seconds, and "
        f"{counts[FRACTIONAL]:,} with fractional ones, seeded, the same for every method, "
        f"published at {PER_SECOND} a second. Queue: a kombu consumer notes when the message "
        f"reaches its destination queue, against the ETA in its header. Task: a prefork worker "
        f"with two processes notes when the task starts, against the time of the call plus the "
        f"countdown. Below zero is early.",
    )
    late: dict[tuple[str, str, str], list[float]] = {}
    for countdowns, side, method in RUNS:
        seconds = _countdowns(countdowns, counts[countdowns], longest)
        measure = at_the_queue if side == QUEUE_SIDE else at_the_task
        late_ms = measure(bench, method, seconds, f"lateness, {countdowns}, {side}, {method}")
        late[countdowns, side, method] = late_ms
        result.rows.append(
            {
                "countdowns": countdowns,
                "side": side,
                "method": LABELS[method],
                **lateness_columns(late_ms),
                "earliest ms": percentile(late_ms, 0),
                "missing": len(seconds) - len(late_ms),
            }
        )
        result.series[f"{countdowns}/{side}/{method}"] = curve(late_ms)
    for side in (QUEUE_SIDE, TASK_SIDE):
        ours, celerys = late[WHOLE, side, "ours"], late[WHOLE, side, "celery"]
        result.targets.append(Target(f"p50, {side} side", percentile(ours, 50), "≤", 10, "ms"))
        result.targets.append(
            Target(
                f"p99, {side} side, against (b)'s",
                percentile(ours, 99),
                "≤",
                percentile(celerys, 99),
                "ms",
            )
        )
    result.notes.append(
        "Fractional countdowns show the resolution of 125 ms: the delay is rounded up to it, so "
        "they are late by half of it on average and never early. (b) cuts a countdown to whole "
        "seconds: its messages reach the worker up to a second early and are held there, in "
        "prefetch slots."
    )
    return result


def _countdowns(kind: str, count: int, longest: int) -> list[float]:
    chosen = random.Random(2)
    if kind == WHOLE:
        return [float(chosen.randint(1, longest)) for _ in range(count)]
    return [round(chosen.uniform(1, longest), 3) for _ in range(count)]


def at_the_queue(bench: Bench, method: str, countdowns: list[float], what: str) -> list[float]:
    with bench.vhost() as url:
        app = make_app(method, url, confirm=True)
        declare_for(method, app)
        with Arrivals(url) as arrivals:
            due = publish(bench, app, countdowns, what)
            bench.wait_for(
                what, arrivals.count, len(due), timeout_seconds=max(due) - time() + GRACE_SECONDS
            )
            app.close()
            return arrivals.late_ms()


def at_the_task(bench: Bench, method: str, countdowns: list[float], what: str) -> list[float]:
    with bench.vhost() as url:
        return starts_on(url, bench, method, countdowns, what)


def starts_on(
    url: str, bench: Bench, method: str, countdowns: list[float], what: str
) -> list[float]:
    """How late each task starts in a worker on that broker, in milliseconds."""
    with running_worker(method, url, bench.folder) as worker:
        app = make_app(method, url, confirm=True)
        warm = len(countdowns)
        for index in range(warm, warm + WARM_UP):
            app.tasks[TASK].apply_async((index,))
        bench.wait_for(f"{what}: warm up", worker.start_count, WARM_UP, timeout_seconds=20)
        due = publish(bench, app, countdowns, what)
        bench.wait_for(
            what,
            worker.start_count,
            len(due) + WARM_UP,
            timeout_seconds=max(due) - time() + GRACE_SECONDS,
        )
        app.close()
        return [(at - due[index]) * 1000 for index, at in worker.starts() if index < warm]


def publish(bench: Bench, app: Any, countdowns: list[float], what: str) -> list[float]:
    """Send a task for each countdown at a steady pace; returns the due times, unix seconds."""
    send = app.tasks[TASK].apply_async
    due = []
    started = monotonic()
    with bench.progress(f"{what}: publish", len(countdowns)) as done:
        for index, countdown in enumerate(countdowns):
            sleep(max(0.0, started + index / PER_SECOND - monotonic()))
            due.append(time() + countdown)
            send((index,), countdown=countdown)
            done(index)
    return due


def draw(result: Result) -> Figure:
    colours = {"ours": OURS, "celery": OTHERS[0], "held": GREY}
    picture, axes = figure("How late delayed tasks are (whole-second countdowns)", columns=2)
    for one, side in zip(axes, (QUEUE_SIDE, TASK_SIDE), strict=True):
        lines = [
            (method if method == "ours" else LABELS[method].split(" ", 1)[1], values, colour)
            for method, colour in colours.items()
            if (values := result.series.get(f"{WHOLE}/{side}/{method}"))
        ]
        title = "at the destination queue" if side == QUEUE_SIDE else "at the start of the task"
        curves_on(one, title, lines)
    return picture
