"""How long declaring the delay levels takes, and finding them declared."""

from __future__ import annotations

import random
from time import perf_counter

import kombu
from kombu.transport import native_delayed_delivery as celerys_own
from matplotlib.figure import Figure

from benchmarks.apps import declare_for, make_app
from benchmarks.charts import bars_on, figure
from benchmarks.measuring import Bench, Result, Target, median
from celery_native_delay import DelaySettings
from celery_native_delay.core.topology import Topology

ROUNDS = 5
RECONNECTS = 5
ROUTINGS = ("skip", "chain")
BASES = (2, 4, 16)

CELERYS_OWN = "(b) Celery's own"


def run(bench: Bench) -> Result:
    rounds = bench.count(ROUNDS, at_least=1)
    result = Result(
        "Declaring",
        f"Cold: the whole set in an empty virtual host. Connected again: the first use on a new "
        f"connection when the set is there. {rounds} virtual hosts each, {RECONNECTS} further "
        f"connections to each; quorum levels.",
    )
    settings: dict[str, DelaySettings | None] = {
        f"ours, {routing}, base {base}": DelaySettings(routing=routing, base=base)
        for routing in ROUTINGS
        for base in BASES
    }
    ours = [*settings]
    settings[CELERYS_OWN] = None
    cold: dict[str, list[float]] = {label: [] for label in settings}
    warm: dict[str, list[float]] = {label: [] for label in settings}
    order = random.Random(3)
    with bench.progress("declare", rounds) as done:
        for number in range(rounds):
            # Any order: the first set of all meets a broker that has just started.
            for label in order.sample([*settings], len(settings)):
                with bench.vhost() as url:
                    cold[label].append(declared_ms(url, settings[label], cold=True))
                    warm[label] += [
                        declared_ms(url, settings[label], cold=False) for _ in range(RECONNECTS)
                    ]
            done(number + 1)
    for label, values in cold.items():
        result.rows.append(
            {
                "set": label,
                "level queues": _level_queues(settings[label]),
                "cold ms, median": median(values),
                "cold ms, max": max(values),
                "connected again ms, median": median(warm[label]),
                "connected again ms, max": max(warm[label]),
            }
        )
        result.series[label] = {"cold": median(values), "warm": median(warm[label])}
    slowest = max(ours, key=lambda label: median(cold[label]))
    result.targets = [
        Target("cold, defaults", median(cold[ours[0]]), "<", 1500, "ms"),
        Target(f"cold, slowest ({slowest})", median(cold[slowest]), "<", 1500, "ms"),
        Target(
            "connected again, slowest", max(median(warm[label]) for label in ours), "<", 20, "ms"
        ),
    ]
    result.notes.append(
        "(b) is declared by workers only and again at every connection; its time includes the "
        "binding of one queue. (a) declares nothing."
    )
    return result


def declared_ms(url: str, settings: DelaySettings | None, *, cold: bool) -> float:
    """Milliseconds until the set is known to be there; None for Celery's own."""
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
    picture, axes = figure("Declaring the delay levels", height=6.4, rows=2)
    for one, key, title in (
        (axes[0], "cold", "cold"),
        (axes[1], "warm", "on a new connection, when present"),
    ):
        one.set_title(title, fontsize=10, loc="left")
        bars_on(
            one,
            "milliseconds, median",
            [
                (label, values[key], None, label.startswith("ours"))
                for label, values in result.series.items()
            ],
        )
    return picture
