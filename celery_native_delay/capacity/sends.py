"""The tasks of a load, one by one, as a simulation needs them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import floor
from typing import NamedTuple

from .load import Load

#: No more are simulated.
MOST_TASKS = 60_000


class Send(NamedTuple):
    """A task that is sent at *at_ms*, to wait so long."""

    at_ms: float
    delay_us: int


def steady_sends(load: Load, chance: random.Random) -> Iterator[Send]:
    """Tasks of *load* for ever: one by one at random, or together at every tick."""
    per_ms, tick_ms = load.per_second / 1000, load.tick_seconds * 1000
    at_ms = 0.0
    for number, delay_us in enumerate(load.draw_us(chance)):
        if tick_ms:
            at_ms = floor(number / per_ms / tick_ms + 1e-9) * tick_ms
        else:
            at_ms += chance.expovariate(per_ms)
        yield Send(at_ms, delay_us)


def fan_out_sends(load: Load, chance: random.Random) -> list[Send]:
    """The tasks of a fan-out that are due around its densest moment, in the order of sending.

    Each is sent at any moment of the time that sending takes, and never after it is due.
    """
    densest = load.densest
    begin_us, end_us = densest.first_us - 1_000_000, densest.last_us + 1_000_000
    seconds = load.weight / load.per_second
    sends = []
    for spread in load.spreads:
        low, high = max(spread.first_us, begin_us), min(spread.last_us, end_us)
        if low > high:
            continue
        width = max(spread.last_us - spread.first_us, 1)
        count = spread.weight * ((high - low) / width if high > low else 1.0)
        for _ in range(round(count)):
            due_us = chance.randint(low, high)
            at_ms = chance.uniform(0, min(seconds * 1000, due_us / 1000))
            sends.append(Send(at_ms, round(due_us - at_ms * 1000)))
    if len(sends) > MOST_TASKS:
        sends = _nearest(sends, (densest.first_us + densest.last_us) / 2)
    return sorted(sends)


def _nearest(sends: list[Send], due_us: float) -> list[Send]:
    """As many as can be simulated, due nearest to *due_us*."""
    return sorted(sends, key=lambda one: abs(one.at_ms * 1000 + one.delay_us - due_us))[:MOST_TASKS]
