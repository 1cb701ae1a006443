"""Measure the client's time in ``apply_async(countdown=60)``."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

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

ROUNDS = 60
BLOCK = 50
"""The number of consecutive publishes of one way."""

OURS, NOW, CELERY = "ours, countdown=60", "immediate, confirmed", "(b) Celery's own, confirmed"

#: The method and the countdown of each way.
WAYS = {OURS: ("ours", 60.0), NOW: ("celery", None), CELERY: ("celery", 60.0)}


def run(bench: Bench) -> Result:
    rounds = bench.count(ROUNDS, at_least=3)
    with ExitStack() as stack:
        ways = {}
        for label, (method, countdown) in WAYS.items():
            url = stack.enter_context(bench.vhost())
            app = stack.enter_context(sending(method, url, confirm=method == "celery"))
            send = partial(app.tasks[TASK].apply_async, countdown=countdown)
            ways[label] = partial(block_of, lambda number, send=send: send((number,)), BLOCK)
        found = alternate(bench, "publish", rounds, ways)
    return conclude(found, rounds)


def conclude(found: dict[str, list[Block]], rounds: int) -> Result:
    result = Result(
        "Client cost of a publish",
        f"apply_async() of a task with one argument, in one process and thread. Each variant has "
        f"its own virtual host, and each publish waits for the broker's confirm. In each of "
        f"{rounds} rounds every variant publishes {BLOCK} times, in random order. Ratios are "
        f"ratios of medians; the brackets have the middle half of the ratios of single rounds. "
        f"CPU is the client's CPU time per publish.",
    )
    middle = {way: median(seconds_of(blocks)) for way, blocks in found.items()}
    cpu = {way: median(block.cpu_seconds for block in blocks) for way, blocks in found.items()}
    for way, blocks in found.items():
        low, _, high = quartiles(
            median(ours.seconds) / median(block.seconds)
            for ours, block in zip(found[OURS], blocks, strict=True)
        )
        ratio = f"{middle[OURS] / middle[way]:.3f} ({low:.2f}-{high:.2f})"
        result.rows.append(
            {
                "variant": way,
                **percentile_columns(seconds_of(blocks), "µs"),
                "CPU µs": cpu[way] * 1e6,
                "ours : this": "1" if way == OURS else ratio,
            }
        )
        result.series[way] = quartiles(seconds * 1e6 for seconds in seconds_of(blocks))
    for other in (NOW, CELERY):
        ratio_of_medians = middle[OURS] / middle[other]
        result.targets.append(Target(f"ours : {other} (medians)", ratio_of_medians, "≤", 1.10))
    result.notes.append(
        f"CPU of the client, ours : immediate {cpu[OURS] / cpu[NOW]:.2f}, ours : (b) "
        f"{cpu[OURS] / cpu[CELERY]:.2f}."
    )
    return result


def draw(result: Result) -> Figure:
    title = "Client time to publish one task"
    return quartile_bars(title, "microseconds", result.series, lambda label: label[:4] == "ours")
