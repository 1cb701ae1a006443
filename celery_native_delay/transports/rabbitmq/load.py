"""Estimate the message rate of each delay queue (a queue with a TTL)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .topology import Level, Topology

#: Bytes of the broker's memory for a waiting message of a small task (``benchmarks pending``).
MEMORY_BYTES = 2_300

#: The benchmarks' throughput, on two processors that publisher and consumer shared.
CEILINGS = (
    "in the benchmarks RabbitMQ 4.3 on two processors carried 4,500 delayed messages a second, and "
    "3,000 through a single level queue"
)


@dataclass(frozen=True)
class Delays:
    """Uniformly distributed delays, from the shortest (*first_us*) to the longest (*last_us*)."""

    first_us: int
    last_us: int

    @property
    def mean_seconds(self) -> float:
        return (self.first_us + self.last_us) / 2_000_000


@dataclass(frozen=True)
class QueueLoad:
    """The estimated message rate of one delay queue."""

    queue: str
    ttl_seconds: float
    per_second: float

    @property
    def waiting(self) -> float:
        """Return the mean number of messages in the queue."""
        return self.per_second * self.ttl_seconds


def queue_loads(topology: Topology, per_second: float, delays: Sequence[Delays]) -> list[QueueLoad]:
    """Return the estimated load of each used delay queue, highest message rate first.

    *per_second* is the rate of all delayed messages; each item of *delays* has an equal share.
    """
    found = []
    for level in topology.levels:
        for units in level.steps:
            shares = [_share(one, level, units, topology.resolution_ms) for one in delays]
            if share := sum(shares) / len(delays):
                (hop,) = topology.path(units)
                found.append(QueueLoad(hop.queue, hop.delay_ms / 1000, per_second * share))
    return sorted(found, key=lambda one: -one.per_second)


def _share(delays: Delays, level: Level, units: int, resolution_ms: int) -> float:
    """Return the fraction of all delayed messages that pass through one delay queue."""
    unit_us = resolution_ms * 1000
    low_us = units * unit_us
    width_us = unit_us << level.lowest
    round_us = width_us << level.width

    def below(end_us: int) -> int:
        rounds, rest_us = divmod(end_us, round_us)
        return rounds * width_us + min(max(rest_us - low_us, 0), width_us)

    first_us, last_us = delays.first_us + unit_us - 1, delays.last_us + unit_us - 1  # rounded up
    return (below(last_us + 1) - below(first_us)) / (last_us - first_us + 1)
