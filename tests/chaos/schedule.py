"""Make a schedule of faults from a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

SETTLE_SECONDS = 4.0
"""Seconds before the first fault, in which producers declare queues and send first tasks."""

SHORTEST_GAP_SECONDS, LONGEST_GAP_SECONDS = 1.0, 20.0
"""Seconds between two faults; fewer in a short run."""


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault of a broker, worker or producer."""

    name: str
    shortest_seconds: float
    longest_seconds: float
    targets: int = 1
    """The number of nodes, workers or producers that it can hit."""


@dataclass(frozen=True)
class Fault:
    """One fault of a schedule, in seconds since the load began."""

    at_seconds: float
    kind: str
    target: int
    """The number of the node, worker or producer, from 0."""
    lasts_seconds: float


def schedule(seed: int, minutes: float, kinds: Sequence[FaultKind]) -> list[Fault]:
    """The faults of a run of *minutes*, one after another, with every kind once before any twice.

    All faults end within the run; a short run has fewer faults.
    """
    chance = Random(seed)
    faults: list[Fault] = []
    longest_gap = min(SHORTEST_GAP_SECONDS + 4 * minutes, LONGEST_GAP_SECONDS)
    now = SETTLE_SECONDS
    for kind in _deal(chance, kinds):
        lasts = round(chance.uniform(kind.shortest_seconds, kind.longest_seconds), 1)
        if now + lasts > minutes * 60:
            break
        faults.append(Fault(round(now, 1), kind.name, chance.randrange(kind.targets), lasts))
        now += lasts + chance.uniform(SHORTEST_GAP_SECONDS, longest_gap)
    return faults


def _deal(chance: Random, kinds: Sequence[FaultKind]) -> Iterator[FaultKind]:
    """Yield all *kinds* again and again, each time in a new order."""
    while kinds:
        yield from chance.sample(kinds, len(kinds))
