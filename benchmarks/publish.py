"""Measure the client's time in ``apply_async(countdown=60)``."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter, process_time

from matplotlib.figure import Figure

from benchmarks.apps import TASK, declare_for, make_app
from benchmarks.charts import quartile_bars
from benchmarks.measuring import Bench, Result, Target, median, percentile_columns, quartiles

ROUNDS = 60
BLOCK = 50
"""The number of consecutive publishes of one variant."""
WARM_UP = 100
COUNTDOWN_SECONDS = 60


@dataclass
class Variant:
    """One way to publish, with the measured time of each publish."""

    key: str
    label: str
    method: str
    countdown: float | None = COUNTDOWN_SECONDS
    blocks: list[list[float]] = field(default_factory=list)
    """The seconds of each publish, by block."""
    cpu_seconds: list[float] = field(default_factory=list)
    """The CPU seconds of this process per publish, by block."""

    @property
    def seconds(self) -> list[float]:
        return [seconds for block in self.blocks for seconds in block]


def variants() -> list[Variant]:
    return [
        Variant("ours", "ours, countdown=60", "ours"),
        Variant("now", "immediate, confirmed", "celery", countdown=None),
        Variant("celery", "(b) Celery's own, confirmed", "celery"),
    ]


def run(bench: Bench) -> Result:
    rounds = bench.count(ROUNDS, at_least=3)
    ways = variants()
    with ExitStack() as stack:
        send = {}
        for way in ways:
            url = stack.enter_context(bench.vhost())
            app = make_app(way.method, url, confirm=way.method == "celery")
            stack.callback(app.close)
            declare_for(way.method, app)
            # Celery knows the level exchange of method (b), so the measured publishes declare
            # nothing.
            send[way.key] = app.tasks[TASK].apply_async
            for index in range(WARM_UP):
                send[way.key]((index,), countdown=way.countdown)
        order = random.Random(1)
        gc.disable()
        stack.callback(gc.enable)
        with bench.progress("publish", rounds) as done:
            for number in range(rounds):
                for way in order.sample(ways, len(ways)):
                    gc.collect()
                    measure(way, send[way.key])
                done(number + 1)
    return conclude(ways, rounds)


def measure(way: Variant, send: Callable[..., object]) -> None:
    """Measure the time of each publish in one block."""
    block = []
    cpu = process_time()
    for index in range(BLOCK):
        started = perf_counter()
        send((index,), countdown=way.countdown)
        block.append(perf_counter() - started)
    way.cpu_seconds.append((process_time() - cpu) / BLOCK)
    way.blocks.append(block)


def conclude(ways: list[Variant], rounds: int) -> Result:
    by_key = {way.key: way for way in ways}
    result = Result(
        "Client cost of a publish",
        f"apply_async() of a task with one argument, in one process and thread. Each variant has "
        f"its own virtual host, and each publish waits for the broker's confirm. In each of "
        f"{rounds} rounds every variant publishes {BLOCK} times, in random order. Ratios are "
        f"ratios of medians; the brackets have the middle half of the ratios of single rounds. "
        f"CPU is the client's CPU time per publish.",
    )
    for way in ways:
        result.rows.append(
            {
                "variant": way.label,
                **percentile_columns(way.seconds, "µs"),
                "CPU µs": median(way.cpu_seconds) * 1e6,
                "ours : this": _ratio_text(by_key["ours"], way),
            }
        )
        result.series[way.label] = quartiles(seconds * 1e6 for seconds in way.seconds)
    for other in ("now", "celery"):
        result.targets.append(
            Target(
                f"ours : {by_key[other].label} (medians)",
                ratio(by_key["ours"], by_key[other]),
                "≤",
                1.10,
            )
        )
    cpu = {way.key: median(way.cpu_seconds) for way in ways}
    result.notes.append(
        f"CPU of the client, ours : immediate {cpu['ours'] / cpu['now']:.2f}, ours : (b) "
        f"{cpu['ours'] / cpu['celery']:.2f}."
    )
    return result


def ratio(ours: Variant, other: Variant) -> float:
    return median(ours.seconds) / median(other.seconds)


def _ratio_text(ours: Variant, other: Variant) -> str:
    if ours is other:
        return "1"
    ratios = [median(a) / median(b) for a, b in zip(ours.blocks, other.blocks, strict=True)]
    low, _, high = quartiles(ratios)
    return f"{ratio(ours, other):.3f} ({low:.2f}-{high:.2f})"


def draw(result: Result) -> Figure:
    title = "Client time to publish one task"
    return quartile_bars(title, "microseconds", result.series, lambda label: label[:4] == "ours")
