"""Measure the client's time in ``apply_async(countdown=60)``."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from matplotlib.figure import Figure

from benchmarks.apps import TASK, sending
from benchmarks.charts import quartile_bars
from benchmarks.measuring import Bench, Result, Target, alternating_calls, median, quartiles

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
            ways[label] = lambda number, send=send: send((number,))
        found = alternating_calls("publish", rounds, ways, BLOCK)
    result = Result(
        "Client cost of a publish",
        f"apply_async() of a task with one argument, in one process and thread. Each variant has "
        f"its own virtual host, and each publish waits for the broker's confirm. In each of "
        f"{rounds} rounds every variant publishes {BLOCK} times, in random order. Ratios are "
        f"ratios of medians; the brackets have the middle half of the ratios of single rounds. "
        f"CPU is the client's CPU time per publish.",
    )
    ours_cpu = found[OURS].cpu_seconds
    for way, calls in found.items():
        rounds_of_both = zip(found[OURS], calls, strict=True)
        low, _, high = quartiles(
            median(ours.seconds) / median(block.seconds) for ours, block in rounds_of_both
        )
        ratio = found[OURS].median / calls.median
        result.rows.append(
            {
                "variant": way,
                **calls.columns_us,
                "CPU µs": calls.cpu_seconds * 1e6,
                "ours : this": "1" if way == OURS else f"{ratio:.3f} ({low:.2f}-{high:.2f})",
            }
        )
        result.series[way] = calls.quartiles_us
        if way != OURS:
            result.targets.append(Target(f"ours : {way} (medians)", ratio, "≤", 1.10))
    result.notes.append(
        f"CPU of the client, ours : immediate {ours_cpu / found[NOW].cpu_seconds:.2f}, ours : (b) "
        f"{ours_cpu / found[CELERY].cpu_seconds:.2f}."
    )
    return result


def draw(result: Result) -> Figure:
    title = "Client time to publish one task"
    return quartile_bars(title, "microseconds", result.series, lambda label: label[:4] == "ours")
