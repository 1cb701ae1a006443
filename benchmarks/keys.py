"""Measure the client's time in ``debounce()`` and ``unique()``, compared with a delayed publish."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count

from celery import Celery
from matplotlib.figure import Figure

from benchmarks.apps import TASK, sending
from benchmarks.charts import quartile_bars
from benchmarks.measuring import (
    Bench,
    Block,
    Result,
    Target,
    alternate,
    block_of,
    median,
    percentile_columns,
    quartiles,
    seconds_of,
)
from celery_native_delay import Delay
from example_project.folder_broker import SCHEME

ROUNDS = 60
BLOCK = 40
"""The number of consecutive calls of one variant."""
KEYS = 10
WAIT_SECONDS = 600.0

DELAYED, DEBOUNCED, THROTTLED, CLAIMED, TAKEN = (
    "apply_async(countdown=…)",
    "debounce(), in place of one that waits",
    "throttle(), within its window",
    "unique(), a new key",
    "unique(), one waits",
)


def run(bench: Bench) -> Result:
    rounds = bench.count(ROUNDS, at_least=3)
    with ExitStack() as stack:
        redis, store = (stack.enter_context(bench.redis()).url for _ in range(2))
        apps = {
            "Redis": sending("ours", redis),
            "RabbitMQ": sending("ours", stack.enter_context(bench.vhost()), store=store),
            "SQLite": sending("ours", f"{SCHEME}{bench.folder}/keys"),
        }
        found = {
            place: alternate(bench, f"keys, {place}", rounds, ways(stack.enter_context(app)))
            for place, app in apps.items()
        }
    result = Result(
        "One task for a key",
        f"Calls in one process and thread with {KEYS} keys: {BLOCK} in a row, alternating, "
        f"{rounds} rounds, medians. RabbitMQ has its records in Redis, and each publish waits for "
        f"its confirm.",
    )
    for place, by_way in found.items():
        middle = {way: median(seconds_of(blocks)) for way, blocks in by_way.items()}
        for way, blocks in by_way.items():
            result.rows.append(
                {
                    "broker": place,
                    "call": way,
                    **percentile_columns(seconds_of(blocks), "µs"),
                    "this : delayed": middle[way] / middle[DELAYED],
                }
            )
            each_us = (seconds * 1e6 for seconds in seconds_of(blocks))
            result.series[f"{place}: {way}"] = quartiles(each_us)
        if place != "RabbitMQ":  # where the delayed task waits in the broker, and its key elsewhere
            ratio = middle[DEBOUNCED] / middle[DELAYED]
            result.targets.append(Target(f"{place}, debounce : delayed (medians)", ratio, "≤", 1.5))
    return result


def ways(app: Celery) -> dict[str, Callable[[], Block]]:
    """Return the calls of each variant."""
    task, delay, numbers = app.tasks[TASK], Delay(app), count()
    task.apply_async((0,), countdown=WAIT_SECONDS)  # on a folder, it declares the queue
    calls: dict[str, Callable[[int], object]] = {
        DELAYED: lambda number: task.apply_async((number,), countdown=WAIT_SECONDS),
        DEBOUNCED: lambda number: delay.debounce(
            task.s(number), key=f"{number % KEYS}", seconds=WAIT_SECONDS
        ),
        THROTTLED: lambda number: delay.throttle(
            task.s(number), key=f"{number % KEYS}", seconds=WAIT_SECONDS
        ),
        CLAIMED: lambda number: delay.unique(
            task.s(number), key=f"new {next(numbers)}", countdown=WAIT_SECONDS
        ),
        TAKEN: lambda number: delay.unique(
            task.s(number), key=f"{number % KEYS}", countdown=WAIT_SECONDS
        ),
    }
    return {way: partial(block_of, call, BLOCK) for way, call in calls.items()}


def draw(result: Result) -> Figure:
    return quartile_bars(
        "Time of one call", "microseconds", result.series, lambda label: DELAYED not in label
    )
