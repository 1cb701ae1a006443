"""Measure lateness under a steady load of delayed messages, and the highest rate.

The first row of every load has immediate messages at the same rate, with the same body and queue. A
broker that is too slow for immediate messages at a rate is too slow for delayed messages, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from benchmarks.charts import INK, OTHERS, OURS, curves_on, figure
from benchmarks.measuring import Bench, Result, Target, curve
from benchmarks.steady_run import (
    ARGUMENT_BYTES,
    IMMEDIATE,
    TICK_SECONDS,
    WINDOW,
    Delays,
    Load,
    SteadyRun,
)
from celery_native_delay import DelaySettings

SECONDS = 20
"""The number of seconds of sending. After that, the last messages become due."""
ROUNDS = 3
"""The number of runs of a load with a target; the run with the median p99 counts."""

RATES = range(2000, 10_001, 500)
"""The rates, in messages per second, that the search for the highest rate tries in order."""
SEARCH_SECONDS = 12
LATE_MS = 250
"""The largest p99 of lateness, in milliseconds, at which a rate counts as reached."""

SECOND = 8
"""The number of units of the default resolution in a second; delays are counted in these units."""
OURS_LABEL = f"ours ({DelaySettings().fused_bits} fused)"

RANDOM = Delays("16-63 s", (16 * SECOND, 63 * SECOND), SECOND, 25)
MINUTES = Delays("1-10 min", (60 * SECOND, 600 * SECOND), SECOND, 5)
FRACTIONS = Delays("0.5-16 s, any fraction", (4, 16 * SECOND), 0, 125)
SAME = Delays("all 60 s", (60 * SECOND, 60 * SECOND), SECOND, 25)


def loads() -> Iterator[Load]:
    for per_second in (3_000, 1_500):
        yield Load(IMMEDIATE, RANDOM, per_second, has_target=True)
        yield Load(OURS_LABEL, RANDOM, per_second, has_target=True)
        for delays in (MINUTES, FRACTIONS):
            yield Load(OURS_LABEL, delays, per_second)
        yield Load(OURS_LABEL, SAME, per_second, has_target=per_second == 1_500)


def run(bench: Bench) -> Result:
    seconds = bench.count(SECONDS, at_least=2)
    result = Result(
        "Steady load",
        f"Tasks with an argument of {ARGUMENT_BYTES} bytes are sent at a steady rate for {seconds} "
        f"s. One process sends every {TICK_SECONDS * 1000:g} ms with a window of {WINDOW:,} "
        f"confirms: delayed tasks with bulk(app), immediate ones as encoded frames. Another "
        f"process reads the quorum destination queue without acknowledgements. Delays are random "
        f"whole seconds unless the row names others. They run with a shorter resolution than the "
        f"default 125 ms, so that they end sooner; units, queues and messages per second are the "
        f"same. A load with a target ran {bench.count(ROUNDS, at_least=1)} times, alternating with "
        f"other loads; the table has the run with the median p99. Broker CPU is the CPU time of "
        f"its whole process per message, with its idle work.",
    )
    tried: dict[Load, list[SteadyRun]] = {}
    for number in range(bench.count(ROUNDS, at_least=1)):
        for load in loads():
            if load.has_target or not number:
                tried.setdefault(load, []).append(SteadyRun(bench, load, seconds))
    told: list[str] = []
    p99_ms = float("nan")
    for load, runs in tried.items():
        run = sorted(runs, key=lambda run: run.p99_ms)[(len(runs) - 1) // 2]
        name = f"{load.label}, {load.delays.label}"
        if len(runs) > 1:
            every = ", ".join(f"{each.p99_ms:.0f}" for each in runs)
            told.append(f"{name}, {load.per_second:,}/s: {every}")
        result.rows.append(run.row(bench))
        if load.per_second == 3_000:
            result.series[name] = curve(run.late_ms)
            if (load.label, load.delays) == (OURS_LABEL, RANDOM):
                p99_ms = run.p99_ms
    highest = {label: _highest(bench, label) for label in (IMMEDIATE, OURS_LABEL)}
    ratio = highest[OURS_LABEL] / (highest[IMMEDIATE] or float("nan"))
    what = f"highest rate with p99 ≤ {LATE_MS} ms, ours : immediate"
    result.targets = [
        Target("3,000/s, random delays: p99", p99_ms, "≤", LATE_MS, "ms"),
        Target(what, ratio, "≥", 0.7),
    ]
    if told:
        result.notes.append(f"p99 in ms of all repeated runs: {'; '.join(told)}.")
    result.notes += [
        (
            f"Highest rate with p99 ≤ {LATE_MS} ms and the publisher keeping up, in steps of "
            f"{RATES.step}/s: immediate {highest[IMMEDIATE]:,}/s, ours {highest[OURS_LABEL]:,}/s."
        ),
        "Publisher, consumer and broker share the machine's cores.",
        (
            "If all delays are equal, one queue forwards all messages. RabbitMQ keeps at most 32 "
            "unconfirmed messages of a queue in flight (dead_letter_worker_consumer_prefetch), "
            "each until the destination queue has committed it; this limits the rate. Spread such "
            "tasks (`countdown=60 + 30 * random()`), or raise the value if your broker allows it."
        ),
    ]
    return result


def _highest(bench: Bench, label: str) -> int:
    """Return the highest rate of RATES that passes; the search ends after two failures in a row."""
    best = failed = 0
    for per_second in RATES if bench.scale >= 0.5 else RATES[:1]:
        run = SteadyRun(bench, Load(label, RANDOM, per_second), SEARCH_SECONDS)
        if run.keeps_up and run.p99_ms <= LATE_MS:
            best, failed = per_second, 0
        else:
            failed += 1
        if failed == 2:
            break
    return best


def draw(result: Result) -> Figure:
    shown = (
        (IMMEDIATE, RANDOM, "immediate", INK),
        (OURS_LABEL, RANDOM, "ours", OURS),
        (OURS_LABEL, SAME, "ours, all the same", OTHERS[3]),
    )
    lines = []
    for label, delays, text, colour in shown:
        if values := result.series.get(f"{label}, {delays.label}"):
            lines.append((text, values, colour))
    picture, (axes,) = figure("Lateness at 3,000 messages per second")
    curves_on(axes, "on arrival in the destination queue", lines)
    return picture
