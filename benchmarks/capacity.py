"""``python -m benchmarks.capacity``: loads of `steady`, foretold beside what was measured.

The broker's speeds are worked out from a few of the loads, by the processor time of the broker; all
others are foretold. With ``--calibrate`` they are measured as users measure them: then, and where
`steady` ran, nothing else may use the machine.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from celery import Celery

from benchmarks import report, steady
from benchmarks.measuring import BROKER_OPTIONS, log
from benchmarks.steady_run import TICK_SECONDS, Delays
from celery_native_delay import DelaySettings, install
from celery_native_delay.app.parts import admin_part
from celery_native_delay.capacity.levels import mean_hops, passages
from celery_native_delay.capacity.load import Load, Spread
from celery_native_delay.capacity.report import PROCESSORS
from celery_native_delay.capacity.sends import steady_sends
from celery_native_delay.capacity.service import Service
from celery_native_delay.capacity.simulation import Outcome, carried_per_second, simulate
from celery_native_delay.testing import private_rabbitmq
from celery_native_delay.transports.rabbitmq.topology import Topology

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER / "capacity.md"

CLIENTS_MS = 0.04
"""Processor time of publisher and consumer for a message; they run on the broker's machine."""

KEPT_UP_MS = 500
"""A load whose p99 stayed below it did not saturate anything."""

FITTED = 1500
"""The rate of the loads that the speed is worked out from; those of twice as much are foretold."""
_ROUNDS = 4
"""How many share a turn follows from the speed, which follows from how many share a turn."""
CEILING = 3000, "all 60 s"
"""A load for one queue alone, more than it carries on most machines."""

UTILISATION, LATENESS = 0.2, 2.0
"""Part by which foretold and measured utilisation may differ, and factor between both p99."""


@dataclass(frozen=True)
class Compared:
    """A load of `steady`: its row there, and what is foretold of it."""

    row: dict[str, Any]
    cpu_us: float
    """CPU of the broker for a task, foretold, with its idle work."""
    outcome: Outcome
    first: tuple[str, float]
    """What saturates first, and at how many tasks a second."""

    @property
    def kept_up(self) -> bool:
        return bool(self.row["p99 ms"] <= KEPT_UP_MS)

    @property
    def utilisation_ratio(self) -> float:
        return self.cpu_us / self.row["broker CPU µs"]

    @property
    def lateness_ratio(self) -> float:
        return self.outcome.percentile_ms(99) / self.row["p99 ms"]

    def cells(self) -> dict[str, Any]:
        busy = self.row["asked/s"] / _cores() / 1e6
        ours = self.outcome
        return {
            "RabbitMQ": self.row["RabbitMQ"],
            "tasks/s": self.row["asked/s"],
            "delays": self.row["delays"],
            "levels": self.row["levels"] + (" *" if is_fitted(self.row) else ""),
            "CPU, foretold": f"{self.cpu_us * busy * 100:.0f} %",
            "measured": f"{self.row['broker CPU µs'] * busy * 100:.0f} %",
            "ratio": f"{self.utilisation_ratio:.2f}",
            "p99 ms, foretold": "grows" if ours.growing else f"{ours.percentile_ms(99):,.0f}",
            "p99 ms, measured": f"{self.row['p99 ms']:,.0f}",
            "p99 ratio": f"{self.lateness_ratio:.2f}" if self.kept_up else "saturated",
            "saturates first, at": f"{self.first[0]}, {self.first[1]:,.0f}/s",
        }


def main() -> int:
    """Exit status 0, whether foretold and measured agree or not: the page says it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    parser.add_argument(
        "--calibrate", action="store_true", help="measure private brokers, half a minute each"
    )
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of results.json")
    options = parser.parse_args()
    rows = report.read(options.results)["steady"].rows
    versions = sorted({_short(row["RabbitMQ"]) for row in rows})
    find = calibrated if options.calibrate else partial(fitted, rows)
    services = {version: find(version) for version in versions}
    how = (
        "as `--calibrate` measures it"
        if options.calibrate
        else "worked out from the loads marked with a star, and from immediate messages"
    )
    PAGE.write_text(page(list(compare(rows, services)), services, how))
    log(PAGE.read_text())
    return 0


def calibrated(version: str) -> Service:
    """The speed of a private broker on this machine, as `delay capacity --calibrate` finds it."""
    with private_rabbitmq(version=version, **BROKER_OPTIONS) as broker:
        app = install(Celery("bench", broker=broker.url, set_as_current=False))
        with app, app.connection_for_write() as connection:
            part: Any = admin_part(app, connection)
            timings = part.calibrate(lambda what: log(f"RabbitMQ {version}: {what}"))
    log(str(timings))
    return Service.of(timings, cores=_cores())


def fitted(rows: list[dict[str, Any]], version: str) -> Service:
    """The speed that immediate messages and some of the loads make of a version.

    A message costs what an immediate one does. Hops and turns cost what is left of the loads at the
    rate FITTED, which differ in how many tasks share a turn. A queue's ceiling is the pace of more
    tasks with one delay than it could carry. Pauses are those that made immediate messages late.
    """
    mine = [row for row in rows if row["RabbitMQ"].startswith(version)]
    alone = next(row for row in reversed(mine) if row["levels"] == "immediate")
    message_ms = alone["broker CPU µs"] / 1000 - idle_cores(rows) / alone["asked/s"] * 1000
    # A pause makes a hundredth of the messages later than the p99, the first by all of it.
    pauses = 0.01 * 60_000 / (alone["max ms"] - alone["p99 ms"])
    service = Service(
        _cores(), message_ms, 0.15, 0.45, 4.0, pause_ms=alone["max ms"], pauses_per_minute=pauses
    )
    for _ in range(_ROUNDS):
        service = at_pace(rows, service)
        work = []
        for row in (row for row in mine if row["asked/s"] == FITTED and row["hops"]):
            turns = foretell(rows, row, service)[0].turns_per_task
            left_ms = (row["broker CPU µs"] - idle_us(rows, row)) / 1000 - message_ms
            work.append((row["hops"], turns, left_ms))
        service = replace(service, **_shares(work))
    return at_pace(rows, service)


def at_pace(rows: list[dict[str, Any]], service: Service) -> Service:
    """The *service* whose queues pass no more than one did that could not carry its load.

    Where it could, as it is: its ceiling was not seen.
    """
    full = next(row for row in rows if (row["asked/s"], row["delays"]) == CEILING)
    if full["p99 ms"] <= KEPT_UP_MS:
        return service
    pace = full["asked/s"] * steady.SECONDS / (steady.SECONDS + full["max ms"] / 1000)
    return service.with_service_ms(service.prefetch * 1000 / pace)


def _shares(work: list[tuple[float, float, float]]) -> dict[str, float]:
    """What a hop and a turn cost, if so many of each cost so much: least squares, by ratio."""
    rows = [(hops / left_ms, turns / left_ms) for hops, turns, left_ms in work]
    aa, ab, bb = (sum(one[i] * one[j] for one in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(one[i] for one in rows) for i in (0, 1))
    whole = aa * bb - ab * ab
    return {"hop_ms": (a * bb - b * ab) / whole, "turn_ms": (b * aa - a * ab) / whole}


def is_fitted(row: dict[str, Any]) -> bool:
    """True for a load from which the speed is worked out."""
    return row["asked/s"] == FITTED or (row["asked/s"], row["delays"]) == CEILING


def compare(rows: list[dict[str, Any]], services: dict[str, Service]) -> Iterator[Compared]:
    """Every delayed load of `steady`."""
    for row in rows:
        if row["levels"] != "immediate":
            outcome, first = foretell(rows, row, services[_short(row["RabbitMQ"])])
            cpu_us = outcome.cpu_ms_per_task * 1000 + idle_us(rows, row)
            yield Compared(row, cpu_us, outcome, first)


def idle_cores(rows: list[dict[str, Any]]) -> float:
    """Processors that the broker takes for itself: immediate messages cost more, where few come."""
    cost = {
        row["asked/s"]: row["broker CPU µs"]
        for row in rows
        if row["levels"] == "immediate" and row["RabbitMQ"] == rows[0]["RabbitMQ"]
    }
    most, least = max(cost), min(cost)
    return float((cost[least] - cost[most]) / (1e6 / least - 1e6 / most))


def idle_us(rows: list[dict[str, Any]], row: dict[str, Any]) -> float:
    """A task's part of that: `steady` looks from the first message until the last has come."""
    whole = 1 + _delays_of(row).longest_seconds / steady.SECONDS
    return idle_cores(rows) * whole / row["asked/s"] * 1e6


def foretell(
    rows: list[dict[str, Any]], row: dict[str, Any], service: Service
) -> tuple[Outcome, tuple[str, float]]:
    """The end of a load as `steady` runs it, and what saturates first, at how many a second."""
    delays, per_second = _delays_of(row), row["asked/s"]
    topology = Topology(replace(_settings_of(row), resolution=delays.resolution_ms / 1000))
    left = service.cores - idle_cores(rows) - per_second * CLIENTS_MS / 1000
    service = replace(service, cores=left)
    load = Load(per_second, (_spread(delays),), TICK_SECONDS)
    sends = islice(steady_sends(load, random.Random(1)), steady.SECONDS * per_second)
    outcome = simulate(topology, service, sends)
    limits = [
        (one.queue.removeprefix(f"{topology.name}."), one.saturates_at_per_second)
        for one in passages(topology, load, service)
    ]
    hops = mean_hops(topology, load.spreads)
    processors = carried_per_second(topology, load, service, hops)
    return outcome, min([(PROCESSORS, processors), *limits], key=lambda one: one[1])


def page(compared: list[Compared], services: dict[str, Service], how: str) -> str:
    """The table in Markdown, and how much of it agrees."""
    foretold = [one for one in compared if not is_fitted(one.row)]
    kept_up = [one for one in compared if one.kept_up]
    near = sum(abs(one.utilisation_ratio - 1) <= UTILISATION for one in foretold)
    close = sum(1 / LATENESS <= one.lateness_ratio <= LATENESS for one in kept_up)
    agrees = (
        f"The broker's speed is {how}. Of the other {len(foretold)} loads the foretold use of the "
        f"processors is within {UTILISATION * 100:.0f} % of the measured one for {near}. Of all "
        f"{len(kept_up)} that saturate nothing (a measured p99 below {KEPT_UP_MS} ms) the foretold "
        f"p99 is within a factor of {LATENESS:g} for {close}. The p99 of one load differs from run "
        f"to run by as much, as the notes to *Steady load* tell."
    )
    speeds = [{"RabbitMQ": name, **one.as_json()} for name, one in services.items()]
    lines = [
        "# Capacity against measurement",
        "",
        "`python -m benchmarks.capacity`",
        "",
        agrees,
        "",
        *report.markdown_table([one.cells() for one in compared]),
        "",
        *report.markdown_table(speeds),
        "",
    ]
    return "\n".join(lines)


def _cores() -> int:
    return os.cpu_count() or 1


def _spread(delays: Delays) -> Spread:
    shortest, longest = (units * delays.resolution_ms / 1000 for units in delays.units)
    return Spread.between(shortest, longest, step_seconds=delays.step * delays.resolution_ms / 1000)


def _delays_of(row: dict[str, Any]) -> Delays:
    every = (steady.RANDOM, steady.MINUTES, steady.FRACTIONS, steady.SAME)
    return next(one for one in every if one.label == row["delays"])


def _settings_of(row: dict[str, Any]) -> DelaySettings:
    levels: str = row["levels"]
    if levels == "binary":
        return steady.BINARY
    bits = levels.removeprefix("ours (").split()[0]
    return DelaySettings(fused_bits=int(bits)) if bits.isdigit() else steady.DEFAULT


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


if __name__ == "__main__":
    raise SystemExit(main())
