"""Measure lateness under a steady load of delayed messages, and the highest rate.

The first row of every load has immediate messages at the same rate, with the same body and queue. A
broker that is too slow for immediate messages at a rate is too slow for delayed messages, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from benchmarks.charts import INK, OTHERS, OURS, curves_on, figure
from benchmarks.measuring import (
    BROKER_OPTIONS,
    Bench,
    Result,
    Target,
    curve,
    log,
    percentile,
)
from benchmarks.steady_run import ARGUMENT_BYTES, TICK_SECONDS, WINDOW, Delays, Load, SteadyRun
from celery_native_delay import DelaySettings
from celery_native_delay.testing import BrokerMissing
from tests.rabbitmqs import private_rabbitmq

SECONDS = 20
"""The number of seconds of sending. After that, the last messages become due."""
ROUNDS = 3
"""The number of runs of a load with a target; the run with the median p99 counts."""
REFERENCE = "4.3"
ALSO = "3.10"

RATES = range(2000, 10_001, 500)
"""The rates, in messages per second, that the search for the highest rate tries in order."""
SEARCH_SECONDS = 12
LATE_MS = 250
"""The largest p99 of lateness, in milliseconds, at which a rate counts as reached."""

DEFAULT = DelaySettings()
BINARY = DelaySettings(fused_bits=0)

SECOND = 8
"""The number of units of the default resolution in a second; delays are counted in these units."""
RANDOM = Delays("16-63 s", (16 * SECOND, 63 * SECOND), SECOND, 25)
MINUTES = Delays("1-10 min", (60 * SECOND, 600 * SECOND), SECOND, 5)
FRACTIONS = Delays("0.5-16 s, any fraction", (4, 16 * SECOND), 0, 125)
SAME = Delays("all 60 s", (60 * SECOND, 60 * SECOND), SECOND, 25)


def loads() -> Iterator[Load]:
    fused = {bits: DelaySettings(fused_bits=bits) for bits in (7, 11, 31)}
    ours = f"ours ({DEFAULT.fused_bits} fused)"
    for per_second in (3_000, 1_500):
        yield Load("immediate", None, RANDOM, per_second, has_target=True)
        yield Load(ours, DEFAULT, RANDOM, per_second, has_target=True)
        yield Load("binary", BINARY, RANDOM, per_second)
        yield Load(ours, DEFAULT, MINUTES, per_second)
        if per_second == 3_000:
            for bits, settings in fused.items():
                yield Load(f"{bits} fused", settings, MINUTES, per_second)
        yield Load(ours, DEFAULT, FRACTIONS, per_second)
        yield Load(ours, DEFAULT, SAME, per_second, has_target=per_second == 1_500)


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
    late: dict[tuple[str, str, int], float] = {}
    told: list[str] = []
    rounds = bench.count(ROUNDS, at_least=1)
    tried: dict[Load, list[SteadyRun]] = {}
    for number in range(rounds):
        for load in loads():
            if load.has_target or not number:
                tried.setdefault(load, []).append(SteadyRun(bench, load, seconds))
    for load, runs in tried.items():
        run = sorted(runs, key=lambda run: percentile(run.late_ms, 99))[(len(runs) - 1) // 2]
        if len(runs) > 1:
            every = ", ".join(f"{percentile(run.late_ms, 99):.0f}" for run in runs)
            told.append(f"{load.label}, {load.delays.label}, {load.per_second:,}/s: {every}")
        late[load.label, load.delays.label, load.per_second] = percentile(run.late_ms, 99)
        result.rows.append(run.row(bench))
        if load.per_second == 3_000:
            result.series[f"{load.label}, {load.delays.label}"] = curve(run.late_ms)
    result.rows += [run.row(other) for other, run in _also(bench, seconds)]
    highest = {}
    for label, settings in (("immediate", None), ("ours", DEFAULT), ("binary", BINARY)):
        highest[label] = _highest(bench, label, settings, result)
    ours = f"ours ({DEFAULT.fused_bits} fused)"
    nan = float("nan")
    result.targets = [
        Target(
            "3,000/s, random delays: p99", late.get((ours, RANDOM.label, 3000), nan), "≤", 250, "ms"
        ),
        Target(
            f"highest rate with p99 ≤ {LATE_MS} ms, ours : immediate",
            highest["ours"] / highest["immediate"] if highest["immediate"] else nan,
            "≥",
            0.7,
        ),
    ]
    if told:
        result.notes.append(f"p99 in ms of all repeated runs: {'; '.join(told)}.")
    result.notes += [
        (
            f"Highest rate with p99 ≤ {LATE_MS} ms and the publisher keeping up, in steps of "
            f"{RATES.step}/s: immediate {highest['immediate']:,}/s, ours {highest['ours']:,}/s, "
            f"binary {highest['binary']:,}/s."
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


def _also(bench: Bench, seconds: int) -> Iterator[tuple[Bench, SteadyRun]]:
    """Yield a few of the loads on the system's RabbitMQ, if it is installed."""
    if not bench.broker.version.startswith(REFERENCE) or bench.scale < 0.5:
        return
    try:
        with private_rabbitmq(version=ALSO, **BROKER_OPTIONS) as broker:
            other = Bench(broker, bench.scale, bench.folder)
            for label, settings in (("immediate", None), ("ours", DEFAULT), ("binary", BINARY)):
                yield other, SteadyRun(other, Load(label, settings, RANDOM, 1_500), seconds)
    except BrokerMissing as exc:
        log(str(exc))


def _highest(bench: Bench, label: str, settings: DelaySettings | None, result: Result) -> int:
    """Return the highest rate of RATES that passes; the search ends after two failures in a row."""
    best = failed = 0
    for per_second in RATES if bench.scale >= 0.5 else RATES[:1]:
        run = SteadyRun(bench, Load(label, settings, RANDOM, per_second), SEARCH_SECONDS)
        if run.keeps_up and percentile(run.late_ms, 99) <= LATE_MS:
            best, failed = per_second, 0
        else:
            failed += 1
        if failed == 2:
            break
    return best


def draw(result: Result) -> Figure:
    ours = f"ours ({DEFAULT.fused_bits} fused)"
    lines = {
        f"immediate, {RANDOM.label}": ("immediate", INK),
        f"{ours}, {RANDOM.label}": ("ours", OURS),
        f"{ours}, {SAME.label}": ("ours, all the same", OTHERS[3]),
        f"binary, {RANDOM.label}": ("binary", OTHERS[0]),
    }
    picture, (axes,) = figure("Lateness at 3,000 messages per second")
    curves_on(
        axes,
        "on arrival in the destination queue",
        [
            (label, result.series[name], colour)
            for name, (label, colour) in lines.items()
            if name in result.series
        ],
    )
    return picture
