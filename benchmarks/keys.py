"""Measure the client's time in ``debounce()`` and ``unique()``, compared with a delayed publish."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import count

from celery import Celery
from matplotlib.figure import Figure

from benchmarks.apps import TASK, sending
from benchmarks.charts import quartile_bars
from benchmarks.measuring import Bench, Result, Target, alternating_calls
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
        found = {}
        for place, app in apps.items():
            calls = calls_of(stack.enter_context(app))
            found[place] = alternating_calls(f"keys, {place}", rounds, calls, BLOCK)
    result = Result(
        "One task for a key",
        f"Calls in one process and thread with {KEYS} keys: {BLOCK} in a row, alternating, "
        f"{rounds} rounds, medians. RabbitMQ has its records in Redis, and each publish waits for "
        f"its confirm.",
    )
    for place, by_way in found.items():
        delayed = by_way[DELAYED].median
        for way, each in by_way.items():
            row = {"broker": place, "call": way, **each.columns_us}
            result.rows.append(row | {"this : delayed": each.median / delayed})
            result.series[f"{place}: {way}"] = each.quartiles_us
        if place != "RabbitMQ":  # where the delayed task waits in the broker, and its key elsewhere
            ratio = by_way[DEBOUNCED].median / delayed
            result.targets.append(Target(f"{place}, debounce : delayed (medians)", ratio, "≤", 1.5))
    return result


def calls_of(app: Celery) -> dict[str, Callable[[int], object]]:
    """Return the call of each variant."""
    task, delay, numbers = app.tasks[TASK], Delay(app), count()
    task.apply_async((0,), countdown=WAIT_SECONDS)  # on a folder, it declares the queue

    def key_of(number: int) -> str:
        return f"{number % KEYS}"

    return {
        DELAYED: lambda at: task.apply_async((at,), countdown=WAIT_SECONDS),
        DEBOUNCED: lambda at: delay.debounce(task.s(at), key=key_of(at), seconds=WAIT_SECONDS),
        THROTTLED: lambda at: delay.throttle(task.s(at), key=key_of(at), seconds=WAIT_SECONDS),
        CLAIMED: lambda at: delay.unique(
            task.s(at), key=f"new {next(numbers)}", countdown=WAIT_SECONDS
        ),
        TAKEN: lambda at: delay.unique(task.s(at), key=key_of(at), countdown=WAIT_SECONDS),
    }


def draw(result: Result) -> Figure:
    return quartile_bars(
        "Time of one call", "microseconds", result.series, lambda label: DELAYED not in label
    )
