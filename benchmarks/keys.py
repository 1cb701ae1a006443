"""Measure the client's time in ``debounce()`` and ``unique()``, compared with a delayed publish."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from time import perf_counter
from typing import Any

from celery import Celery
from matplotlib.figure import Figure

from benchmarks.apps import TASK, declare_for, make_app
from benchmarks.charts import quartile_bars
from benchmarks.measuring import (
    REDIS_CONFIG,
    Bench,
    Result,
    Target,
    median,
    percentile_columns,
    quartiles,
)
from celery_native_delay import Delay
from celery_native_delay.testing import private_redis
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
    found: dict[str, dict[str, list[float]]] = {}
    with places(bench) as apps:
        for place, app in apps.items():
            found[place] = measured(bench, place, app, rounds)
    result = Result(
        "One task for a key",
        f"Calls in one process and thread with {KEYS} keys: {BLOCK} in a row, alternating, "
        f"{rounds} rounds, medians. RabbitMQ has its records in Redis, and each publish waits for "
        f"its confirm.",
    )
    for place, ways in found.items():
        base = median(ways[DELAYED])
        for label, seconds in ways.items():
            result.rows.append(
                {
                    "broker": place,
                    "call": label,
                    **percentile_columns(seconds, "µs"),
                    "this : delayed": median(seconds) / base,
                }
            )
            result.series[f"{place}: {label}"] = quartiles(each * 1e6 for each in seconds)
        if place != "RabbitMQ":  # where the delayed task waits in the broker, and its key elsewhere
            ratio = median(ways[DEBOUNCED]) / base
            result.targets.append(Target(f"{place}, debounce : delayed (medians)", ratio, "≤", 1.5))
    return result


@contextmanager
def places(bench: Bench) -> Iterator[dict[str, Celery]]:
    """Yield one Celery app for each broker, by the broker's name."""
    with ExitStack() as stack:
        redis = stack.enter_context(private_redis(config=REDIS_CONFIG))
        store = stack.enter_context(private_redis(config=REDIS_CONFIG))
        vhost = stack.enter_context(bench.vhost())
        apps = {
            "Redis": make_app("ours", redis.url),
            "RabbitMQ": make_app("ours", vhost, store=store.url),
            "SQLite": make_app("ours", f"{SCHEME}{bench.folder}/keys"),
        }
        for place, app in apps.items():
            stack.callback(app.close)
            if place != "SQLite":  # there the first publish declares everything
                declare_for("ours", app)
        yield apps


def measured(bench: Bench, place: str, app: Celery, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call, by variant."""
    task, delay, numbers = app.tasks[TASK], Delay(app), count()

    def call(make: Callable[[int], object]) -> float:
        number = next(numbers)
        started = perf_counter()
        make(number)
        return perf_counter() - started

    def unique(key: str, number: int) -> Any:
        return delay.unique(task.s(number), key=key, countdown=WAIT_SECONDS)

    ways: dict[str, Callable[[int], object]] = {
        DELAYED: lambda number: task.apply_async((number,), countdown=WAIT_SECONDS),
        DEBOUNCED: lambda number: delay.debounce(
            task.s(number), key=f"{number % KEYS}", seconds=WAIT_SECONDS
        ),
        THROTTLED: lambda number: delay.throttle(
            task.s(number), key=f"{number % KEYS}", seconds=WAIT_SECONDS
        ),
        CLAIMED: lambda number: unique(f"new {number}", number),
        TAKEN: lambda number: unique(f"{number % KEYS}", number),
    }
    found: dict[str, list[float]] = {label: [] for label in ways}
    for make in ways.values():
        for _ in range(2 * KEYS):
            call(make)
    order = random.Random(1)
    with bench.progress(f"keys, {place}", rounds) as done:
        for number in range(rounds):
            for label in order.sample(list(ways), len(ways)):
                gc.collect()
                found[label] += [call(ways[label]) for _ in range(BLOCK)]
            done(number + 1)
    return found


def draw(result: Result) -> Figure:
    return quartile_bars(
        "Time of one call", "microseconds", result.series, lambda label: DELAYED not in label
    )
