"""The answer: what a load makes of the broker, what gives way first, and what to change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..durations import duration
from ..settings import DelaySettings
from ..transports.rabbitmq.topology import Topology
from .advice import Advice, advise
from .levels import Passage, mean_hops, passages
from .load import InvalidLoad, Load
from .service import Service
from .simulation import Outcome, carried_per_second, simulate_load

#: The broker's memory for a message that waits, as the benchmark of pending tasks measures it.
MEMORY_BYTES = 2_300

#: As many places as a level queue can need: classic ones have no limit.
_NO_LIMIT = 1_000_000

_BAR_WIDTH = 30
_SHOWN = 8

_BYTES = ("B", "kB", "MB", "GB", "TB")

PROCESSORS = "the broker's processors"


@dataclass(frozen=True)
class Capacity:
    """A load on a broker with levels: exact numbers, and those of a simulation."""

    settings: DelaySettings
    load: Load
    service: Service
    is_measured: bool
    """False: nothing is known of the user's own broker, and *service* is that of the benchmarks."""
    hops: float
    queues: tuple[Passage, ...]
    limit_per_second: float
    """Tasks a second that the processors carry at most."""
    outcome: Outcome
    advice: tuple[Advice, ...]

    @property
    def processors(self) -> float:
        """Of the processors' time the part that the load takes; more than 1 is too much."""
        per_second = self.load.busiest_per_second
        return per_second * self.outcome.cpu_ms_per_task / self.service.cores / 1000

    @property
    def saturates_first(self) -> tuple[str, float]:
        """The queue that gives way first, or the processors, and at how many tasks a second."""
        places = [(one.queue, one.saturates_at_per_second) for one in self.queues]
        return min([(PROCESSORS, self.limit_per_second), *places], key=lambda one: one[1])

    @property
    def keeps_up(self) -> bool:
        """True if nothing is saturated."""
        growing = self.outcome.growing and not self.load.fixed_dues  # as a herd does, and ends
        return not growing and self.load.busiest_per_second < self.saturates_first[1]

    @property
    def memory_bytes(self) -> float:
        """Memory of the broker for what waits."""
        return self.load.waiting * MEMORY_BYTES

    def as_json(self) -> dict[str, Any]:
        what, per_second = self.saturates_first
        return {
            "load": self.load.as_json(),
            "service": self.service.as_json(),
            "measured": self.is_measured,
            "hops_per_task": self.hops,
            "waiting": round(self.load.waiting),
            "memory_bytes": round(self.memory_bytes),
            "processors": {
                "utilisation": self.processors,
                "cpu_ms_per_task": self.outcome.cpu_ms_per_task,
                "limit_per_second": self.limit_per_second,
            },
            "queues": [
                {
                    "queue": one.queue,
                    "ttl_seconds": one.ttl_ms / 1000,
                    "share": one.share,
                    "per_second": one.per_second,
                    "ceiling_per_second": one.ceiling_per_second,
                    "utilisation": one.utilisation,
                    "waiting": round(one.waiting),
                }
                for one in self.queues
            ],
            "saturates_first": {"what": what, "at_per_second": per_second},
            "keeps_up": self.keeps_up,
            "lateness": self.outcome.as_json(),
            "advice": [one.as_json() for one in self.advice],
        }

    def lines(self, table: Callable[[tuple[str, ...], list[tuple[Any, ...]]], str]) -> list[str]:
        what, at = self.saturates_first
        late = self.outcome
        lines = [
            f"{self.load}",
            (
                f"{self.hops:.2f} hops each; {self.load.waiting:,.0f} wait at a time, in "
                f"{_bytes(self.memory_bytes)} of the broker's memory"
            ),
            "",
            table(("", "full", "", "a second", "at most"), self._rows()),
        ]
        if len(self.queues) > _SHOWN:
            lines.append(f"and {len(self.queues) - _SHOWN} more level queues, less full")
        lines += ["", f"saturates first: {what}, at {_number(at)} tasks a second"]
        if self.keeps_up or self.load.fixed_dues:
            lines.append(
                f"late by: half of the tasks {_ms(late.percentile_ms(50))} at most, 99 % "
                f"{_ms(late.percentile_ms(99))}"
                + (", of those due around the densest second" if self.load.fixed_dues else "")
            )
        else:
            lines.append(
                f"late by: more with every second, as it does not keep up; "
                f"{_ms(late.percentile_ms(99))} after {len(late.late_ms):,} tasks"
            )
        lines += [f"change: {one}" for one in self.advice]
        if not self.is_measured:
            lines.append(
                "these are the speeds of the project's benchmarks, not of your broker's: measure "
                "it with --calibrate, and give it back with --service"
            )
        return lines

    def _rows(self) -> list[tuple[Any, ...]]:
        per_second = self.load.busiest_per_second
        rows = [(PROCESSORS, self.processors, per_second, self.limit_per_second)]
        rows += [
            (one.queue, one.utilisation, one.per_second, one.ceiling_per_second)
            for one in self.queues[:_SHOWN]
        ]
        return [(it, *_bar(part), _number(come), _number(most)) for it, part, come, most in rows]


def capacity(
    settings: DelaySettings, load: Load, service: Service, *, is_measured: bool, seed: int = 1
) -> Capacity:
    """The answer for *load*, with the levels of *settings*.

    Raises:
        InvalidLoad: some of it is delayed for longer than the levels reach.
    """
    if load.longest_seconds > settings.longest_delay_seconds:
        raise InvalidLoad(
            f"expected delays of {duration(settings.longest_delay_seconds)} at most, which "
            f"native_delay_levels and native_delay_resolution reach, got "
            f"{duration(load.longest_seconds)}"
        )
    if settings.queue_type == "classic":
        service = replace(service, prefetch=_NO_LIMIT, turn_ms=0.0)
    topology = Topology(settings)
    queues = tuple(passages(topology, load, service))
    outcome = simulate_load(topology, load, service, seed=seed)
    hops = mean_hops(topology, load.spreads)
    limit = carried_per_second(topology, load, service, hops, seed=seed)
    found = advise(settings, load, service, limit, late_p99_ms=outcome.percentile_ms(99))
    return Capacity(
        settings, load, service, is_measured, hops, queues, limit, outcome, tuple(found)
    )


def _bar(part: float) -> tuple[str, str]:
    """A utilisation as text and as a bar, which a full one fills."""
    length = min(math.ceil(part * _BAR_WIDTH), _BAR_WIDTH)
    more = "▶" if part > 1 else ""
    return f"{part * 100:,.0f} %", f"{'█' * length:<{_BAR_WIDTH}}{more}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ms(milliseconds: float) -> str:
    if milliseconds < 1000:
        return f"{_number(milliseconds)} ms"
    return duration(milliseconds / 1000, up=True)


def _bytes(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(_BYTES) - 1:
        count, unit = count / 1000, unit + 1
    return f"{_number(count)} {_BYTES[unit]}"
