"""Measure a set of delay levels (queues with a TTL) in RabbitMQ.

The scenario measures the time to declare a new set, the time for an existing set, and the cost of
an idle set.
"""

from __future__ import annotations

import random
from time import perf_counter, sleep

import kombu
from kombu.transport import native_delayed_delivery as celerys_own
from matplotlib.figure import Figure

from benchmarks.apps import declare_for, make_app
from benchmarks.charts import bars_on, figure
from benchmarks.measuring import (
    BROKER_OPTIONS,
    Bench,
    Result,
    Target,
    cpu_seconds,
    median,
    resident_bytes,
)
from celery_native_delay import DelaySettings
from celery_native_delay.transports.rabbitmq.topology import Topology
from tests.rabbitmqs import private_rabbitmq

ROUNDS = 5
RECONNECTS = 5
FUSED_BITS = (DelaySettings().fused_bits, 0, 7, 11, 31)
"""The settings of the compared sets of delay levels (queues with a TTL), the default first."""
IDLE_SETS = 5
IDLE_SECONDS = 20
SETTLE_SECONDS = 10

CELERYS_OWN = "(b) Celery's own"


def run(bench: Bench) -> Result:
    rounds = bench.count(ROUNDS, at_least=1)
    result = Result(
        "Declaring",
        f"Cold: declare the whole set in an empty virtual host. Connected again: the first use on "
        f"a new connection if the set exists. {rounds} virtual hosts, and {RECONNECTS} further "
        f"connections to each; quorum levels. Idle: the additional memory and CPU of a broker with "
        f"{IDLE_SETS} empty sets, per set.",
    )
    settings: dict[str, DelaySettings | None] = {
        f"ours, {bits} bits fused": DelaySettings(fused_bits=bits) for bits in FUSED_BITS
    }
    ours = [*settings]
    settings[CELERYS_OWN] = None
    cold: dict[str, list[float]] = {label: [] for label in settings}
    warm: dict[str, list[float]] = {label: [] for label in settings}
    order = random.Random(3)
    with bench.progress("declare", rounds) as done:
        for number in range(rounds):
            # The order is random, because the first set meets a broker that has just started.
            for label in order.sample([*settings], len(settings)):
                with bench.vhost() as url:
                    cold[label].append(declared_ms(url, settings[label], cold=True))
                    warm[label] += [
                        declared_ms(url, settings[label], cold=False) for _ in range(RECONNECTS)
                    ]
            done(number + 1)
    for label, values in cold.items():
        megabytes, cpu_percent = idle_cost(bench, settings[label])
        result.rows.append(
            {
                "set": label,
                "level queues": _level_queues(settings[label]),
                "cold ms, median": median(values),
                "cold ms, max": max(values),
                "connected again ms, median": median(warm[label]),
                "connected again ms, max": max(warm[label]),
                "idle MB": megabytes,
                "idle CPU %": cpu_percent,
            }
        )
        result.series[label] = {"cold": median(values), "warm": median(warm[label])}
    result.targets = [
        Target("cold, defaults", median(cold[ours[0]]), "<", 2000, "ms"),
        Target("connected again, defaults", median(warm[ours[0]]), "<", 1, "ms"),
    ]
    result.notes.append(
        "Only workers declare (b), again at every connection; its time includes the binding of "
        "one queue. (a) declares nothing. CPU is in percent of one core."
    )
    return result


def idle_cost(bench: Bench, settings: DelaySettings | None) -> tuple[float, float]:
    """Return the memory and CPU that one empty set of delay levels (queues with a TTL) costs a
    broker.

    The memory is in megabytes, the CPU in percent of a core.
    """
    if bench.scale < 0.1:
        return float("nan"), float("nan")
    version = bench.broker.version.rpartition(".")[0]
    with private_rabbitmq(version=version, **BROKER_OPTIONS) as broker:
        urls = [broker.new_vhost() for _ in range(IDLE_SETS)]
        before = _idle(broker.pid)
        for url in urls:
            declared_ms(url, settings, cold=True)
        after = _idle(broker.pid)
    megabytes, cpu_percent = (
        (late - early) / IDLE_SETS for early, late in zip(before, after, strict=True)
    )
    return megabytes, cpu_percent


def _idle(pid: int | None) -> tuple[float, float]:
    """Return the resident megabytes of an idle broker, and its CPU use in percent of a core."""
    assert pid is not None
    sleep(SETTLE_SECONDS)
    started, cpu = perf_counter(), cpu_seconds(pid)
    sleep(IDLE_SECONDS)
    percent = (cpu_seconds(pid) - cpu) / (perf_counter() - started) * 100
    return resident_bytes(pid) / 1e6, percent


def declared_ms(url: str, settings: DelaySettings | None, *, cold: bool) -> float:
    """Return the milliseconds to declare a set of delay levels, or to find that the set exists.

    If *settings* is None, measure Celery's own delayed delivery.
    """
    if settings is None:
        app = make_app("celery", url)
        started = perf_counter()
        declare_for("celery", app)
        milliseconds = (perf_counter() - started) * 1000
        app.close()
        return milliseconds
    with kombu.Connection(url, transport_options={"native_delay": settings}) as connection:
        prepared = connection.default_channel.delays.prepare()
        if prepared.declared is not cold:
            raise RuntimeError(f"expected declared={cold}, got {prepared}")
        return float(prepared.seconds * 1000)


def _level_queues(settings: DelaySettings | None) -> int:
    return (
        celerys_own.MAX_NUMBER_OF_BITS_TO_USE
        if settings is None
        else len(Topology(settings).level_queues)
    )


def draw(result: Result) -> Figure:
    picture, axes = figure("Time to declare the delay queues", height=6.4, rows=2)
    for one, key, title in (
        (axes[0], "cold", "in an empty virtual host"),
        (axes[1], "warm", "on a new connection, if the queues exist"),
    ):
        one.set_title(title, fontsize=10, loc="left")
        bars_on(
            one,
            "milliseconds (median)",
            [
                (label, values[key], None, label.startswith("ours"))
                for label, values in result.series.items()
            ],
        )
    return picture
