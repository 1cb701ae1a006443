"""How long declaring the delay levels takes, and finding them declared."""

from __future__ import annotations

from time import perf_counter

import kombu
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
    cold: dict[str, list[float]] = {}
    warm: dict[str, list[float]] = {}
    queues: dict[str, int] = {}
    ways = [
        (f"ours, {routing}, base {base}", DelaySettings(routing=routing, base=base))
        for routing in ROUTINGS
        for base in BASES
    ]
    with bench.progress("declare", rounds * (len(ways) + 1)) as done:
        for number in range(rounds):
            for place, (label, settings) in enumerate(ways):
                queues[label] = len(Topology(settings).level_queues)
                with bench.vhost() as url:
                    cold.setdefault(label, []).append(prepare_ms(url, settings, cold=True))
                    warm.setdefault(label, []).extend(
                        prepare_ms(url, settings, cold=False) for _ in range(RECONNECTS)
                    )
                done(number * (len(ways) + 1) + place + 1)
            with bench.vhost() as url:
                queues[CELERYS_OWN] = 28
                cold.setdefault(CELERYS_OWN, []).append(celerys_own_ms(url))
                warm.setdefault(CELERYS_OWN, []).extend(
                    celerys_own_ms(url) for _ in range(RECONNECTS)
                )
    for label, values in cold.items():
        result.rows.append(
            {
                "set": label,
                "level queues": queues[label],
                "cold ms, median": median(values),
                "cold ms, max": max(values),
                "connected again ms, median": median(warm[label]),
                "connected again ms, max": max(warm[label]),
            }
        )
        result.series[label] = {"cold": median(values), "warm": median(warm[label])}
    ours = [label for label, _ in ways]
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


def prepare_ms(url: str, settings: DelaySettings, *, cold: bool) -> float:
    with kombu.Connection(url, transport_options={"native_delay": settings}) as connection:
        delays = connection.default_channel.delays
        prepared = delays.prepare()
        if prepared.declared is not cold:
            raise RuntimeError(f"expected declared={cold}, got {prepared}")
        return float(prepared.seconds * 1000)


def celerys_own_ms(url: str) -> float:
    app = make_app("celery", url)
    started = perf_counter()
    declare_for("celery", app)
    milliseconds = (perf_counter() - started) * 1000
    app.close()
    return milliseconds


def draw(result: Result) -> Figure:
    picture, axes = figure("Declaring the delay levels", height=3.6, columns=2)
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
