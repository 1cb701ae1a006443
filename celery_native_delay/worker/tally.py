"""Counts of delayed messages, which workers send as Celery events to the metrics exporter."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from math import inf
from typing import Any

#: The event's type. Celery's State, Flower and celery-exporter ignore its group.
EVENT = "delay-tally"

#: Upper bounds of the buckets in which lateness is counted, in seconds.
BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0, inf)


def count_start(tally: Counter[str], late_us: int) -> None:
    """Add a started task to the histogram of lateness (start time minus due time)."""
    late_us = max(late_us, 0)
    tally[bucket(BOUNDS[bisect_left(BOUNDS, late_us / 1_000_000)])] += 1
    tally["late_us"] += late_us


def bucket(bound: float) -> str:
    """Return the name of a histogram bucket from the bucket's upper bound in seconds."""
    return f"late_{bound}"


def counts_of(fields: Mapping[str, Any]) -> Counter[str]:
    """Return the message counts in an event.

    Raises ValueError, TypeError or AttributeError if *fields* is not a dict of counts.
    """
    for name, count in fields.items():
        if not isinstance(count, int) or not 0 <= count < 1 << 63:
            raise ValueError(f"expected {name} to be a count, got {count!r}")
    return Counter(fields)
