"""When which fault happens: pure data, made of a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

SETTLE_SECONDS = 4.0
"""Before the first fault: producers declare what they need and send their first tasks."""

SHORTEST_GAP_SECONDS, LONGEST_GAP_SECONDS = 1.0, 20.0
"""Between the end of a fault and the next one; in a short run there is not so much time."""


@dataclass(frozen=True)
class FaultKind:
    """A fault that a broker or its users can have."""

    name: str
    shortest_seconds: float
    longest_seconds: float
    targets: int = 1
    """How many nodes, workers or producers it can hit."""
    on_request: bool = False
    """Breaks what the broker promises: only happens where it is asked for by name."""
    wipes: bool = False
    """Deletes what waits."""


@dataclass(frozen=True)
class Fault:
    """One fault of a schedule, in seconds since the load began."""

    at_seconds: float
    kind: str
    target: int
    """Which node, worker or producer, from 0."""
    lasts_seconds: float


def schedule(seed: int, minutes: float, kinds: Sequence[FaultKind]) -> list[Fault]:
    """The faults of a run of *minutes*, one after the other: every kind once before any twice.

    They end when the run does, at the latest. A short run has only as many as fit into it.
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
    """All *kinds* in one order after the other, for ever."""
    while kinds:
        yield from chance.sample(kinds, len(kinds))
