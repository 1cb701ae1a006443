"""Measure how late a worker starts delayed tasks."""

from __future__ import annotations

import random
from itertools import product

from matplotlib.figure import Figure

from benchmarks.apps import LABELS, TASK, lateness_ms, make_app, running_worker, send_all
from benchmarks.charts import GREY, OTHERS, OURS, curves_on, figure
from benchmarks.measuring import Bench, Result, Target, curve, lateness_columns, percentile

TASKS = 2_000
PER_SECOND = 200
"""The number of tasks published per second. One confirmed publish takes 2 ms."""
LONGEST_SECONDS = 30
WARM_UP = 20
GRACE_SECONDS = 10
"""The number of seconds from the last due time to the end of a run."""

WHOLE, FRACTIONAL = "whole seconds", "fractional"

#: The runs in order: broker, countdowns and method.
RUNS = [
    *(("RabbitMQ", *each) for each in product((WHOLE, FRACTIONAL), LABELS)),
    *(("Redis", FRACTIONAL, method) for method in ("ours", "held")),
]


def run(bench: Bench) -> Result:
    longest = LONGEST_SECONDS if bench.scale >= 0.5 else 5
    counts = {WHOLE: bench.count(TASKS, at_least=20), FRACTIONAL: bench.count(1_000, at_least=20)}
    result = Result(
        "Lateness",
        f"{counts[WHOLE]:,} tasks with random countdowns of 1-{longest} whole seconds, and "
        f"{counts[FRACTIONAL]:,} with fractional countdowns, the same for every method, published "
        f"at {PER_SECOND} per second. A prefork worker with two processes notes the start of each "
        f"task. Lateness is the start minus the due time; negative values are early.",
    )
    late: dict[tuple[str, str, str], list[float]] = {}
    for broker, countdowns, method in RUNS:
        seconds = _countdowns(countdowns, counts[countdowns], longest)
        what = f"lateness, {broker}, {countdowns}, {method}"
        with bench.vhost() if broker == "RabbitMQ" else bench.redis_url() as url:
            late_ms = starts_on(url, bench, method, seconds, what)
        late[broker, countdowns, method] = late_ms
        result.rows.append(
            {
                "broker": broker,
                "countdowns": countdowns,
                "method": LABELS[method],
                **lateness_columns(late_ms),
                "earliest ms": percentile(late_ms, 0),
                "missing": len(seconds) - len(late_ms),
            }
        )
        result.series[f"{broker}/{countdowns}/{method}"] = curve(late_ms)
    ours, celerys = (late["RabbitMQ", WHOLE, method] for method in ("ours", "celery"))
    redis, held = (late["Redis", FRACTIONAL, method] for method in ("ours", "held"))
    for what, measured, limit in (
        ("RabbitMQ, p50", percentile(ours, 50), 10),
        ("the same, p99 against (b)'s", percentile(ours, 99), percentile(celerys, 99)),
        ("Redis, p50 against (a)'s", percentile(redis, 50), percentile(held, 50) + 3),
    ):
        result.targets.append(Target(what, measured, "≤", limit, "ms"))
    result.notes.append(
        "Fractional countdowns are rounded up to the resolution of 125 ms, so tasks are late by "
        "half of it on average, and never early. (b) cuts a countdown to whole seconds: its "
        "messages reach the worker up to a second early, and the worker holds them in prefetch "
        "slots."
    )
    return result


def _countdowns(kind: str, count: int, longest: int) -> list[float]:
    chosen = random.Random(2)
    if kind == WHOLE:
        return [float(chosen.randint(1, longest)) for _ in range(count)]
    return [round(chosen.uniform(1, longest), 3) for _ in range(count)]


def starts_on(
    url: str, bench: Bench, method: str, countdowns: list[float], what: str
) -> list[float]:
    """Return the lateness in milliseconds of each task's start, in a worker on the broker *url*."""
    with running_worker(method, url, bench.folder) as worker:
        app = make_app(method, url, confirm=True)
        first = len(countdowns)
        send_all(app, TASK, range(first, first + WARM_UP))
        bench.wait_for(f"{what}: warm up", worker.start_count, WARM_UP, timeout_seconds=20)
        late_ms = lateness_ms(
            bench,
            app,
            worker,
            countdowns,
            what,
            per_second=PER_SECOND,
            sent_before=WARM_UP,
            grace_seconds=GRACE_SECONDS,
        )
        app.close()
    return late_ms


def draw(result: Result) -> Figure:
    colours = {"ours": OURS, "celery": OTHERS[0], "held": GREY}
    picture, (axes,) = figure("Lateness of delayed tasks on RabbitMQ")
    lines = [
        (LABELS[method].split(" ", 1)[-1], values, colour)
        for method, colour in colours.items()
        if (values := result.series.get(f"RabbitMQ/{WHOLE}/{method}"))
    ]
    curves_on(axes, "at the start of the task, whole-second countdowns", lines)
    return picture
