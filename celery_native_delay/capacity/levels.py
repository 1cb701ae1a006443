"""The exact part: how many messages of a load come through each level queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..transports.rabbitmq.topology import Hop, Level, Topology
from .load import Load, Spread
from .service import Service


@dataclass(frozen=True)
class Passage:
    """A level queue under a load."""

    queue: str
    ttl_ms: int
    share: float
    """Of all tasks, those that wait in it."""
    per_second: float
    ceiling_per_second: float
    waiting: float
    """Messages in it at a time."""

    @property
    def utilisation(self) -> float:
        """Messages that come, of those that could pass."""
        return self.per_second / self.ceiling_per_second

    @property
    def saturates_at_per_second(self) -> float:
        """Tasks a second, of the load's kind, at which no more can pass."""
        return self.ceiling_per_second / self.share


def passages(topology: Topology, load: Load, service: Service) -> list[Passage]:
    """Level queues that the load comes through, those that carry most first."""
    found = []
    for hop, share in shares(topology, load.spreads):
        per_second = load.busiest_per_second * share
        waiting = load.weight * share if load.fixed_dues else per_second * hop.ttl_ms / 1000
        ceiling = service.ceiling_per_second
        found.append(Passage(hop.queue, hop.ttl_ms, share, per_second, ceiling, waiting))
    return sorted(found, key=lambda one: -one.share)


def shares(topology: Topology, spreads: tuple[Spread, ...]) -> Iterator[tuple[Hop, float]]:
    """Level queues that tasks wait in, each with its share of all tasks."""
    weight = sum(one.weight for one in spreads)
    for level in topology.levels:
        for units in level.steps:
            share = sum(
                one.weight * _waiting_for(one, level, units, topology.resolution_ms)
                for one in spreads
            )
            if share:
                yield topology.path(units)[0], share / weight


def mean_hops(topology: Topology, spreads: tuple[Spread, ...]) -> float:
    """Hops of a task on average."""
    return sum(share for _, share in shares(topology, spreads))


def floor_sum(count: int, divisor: int, factor: int, addend: int) -> int:
    """Sum of ``(factor * i + addend) // divisor`` for i from 0 to *count* - 1, in few steps.

    Lattice points below a line: what whole steps leave over is counted along the other axis, and
    so on, as Euclid's algorithm goes.
    """
    total = 0
    while True:
        whole, factor = divmod(factor, divisor)
        total += whole * (count * (count - 1) // 2)
        whole, addend = divmod(addend, divisor)
        total += whole * count
        last = factor * count + addend
        if last < divisor:
            return total
        count, addend = divmod(last, divisor)
        divisor, factor = factor, divisor


def _waiting_for(spread: Spread, level: Level, units: int, resolution_ms: int) -> float:
    """The share of a spread's tasks that wait *units*, a step of *level*, in that level.

    Those are the delays that, rounded up, are *units* or less than a step more, but for what they
    wait for in other levels: multiples of all its steps.
    """
    unit_us = resolution_ms * 1000
    first_us = spread.first_us + unit_us - 1  # rounded up
    step = 1 << level.lowest
    round_us = unit_us * (step << level.width)
    below, upto = (
        floor_sum(spread.count, round_us, spread.step_us, first_us - edge * unit_us)
        for edge in (units, units + step)
    )
    return (below - upto) / spread.count
