"""Formats and parses durations as people write them, such as ``1 h 10 min``."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from .errors import InvalidDueTime

DAY_US = 86_400_000_000

_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "min": 60_000, "s": 1000}

#: Each pair (A, B): a duration of at least A ms is rounded to a multiple of B ms.
_STEPS_MS = ((86_400_000, 3_600_000), (3_600_000, 60_000), (10_000, 1000), (1000, 100), (0, 1))

_NUMBER = r"(\d+(?:\.\d+)?)\s*"

#: A duration as people write it, the largest unit first.
_WRITTEN = re.compile(
    rf"(-?)\s*(?:{_NUMBER}d(?:ays?)?)?\s*(?:{_NUMBER}h(?:ours?)?)?"
    rf"\s*(?:{_NUMBER}m(?:in(?:utes?)?)?)?\s*(?:{_NUMBER}s(?:ec(?:onds?)?)?)?"
)


def duration(seconds: float, *, exact: bool = False, up: bool = False) -> str:
    """Format seconds with the two largest units, such as ``1 h 10 min``.

    Args:
        exact: if True, use all units, down to milliseconds.
        up: if True, round up; if False, round to the nearest value.
    """
    if seconds < 0:
        return f"-{duration(-seconds, exact=exact)}"
    ms = seconds * 1000
    step_ms = 1 if exact else next(step for least, step in _STEPS_MS if ms >= least)
    steps = math.ceil(round(ms / step_ms, 6)) if up else round(ms / step_ms)
    left_ms = steps * step_ms
    parts = []
    for unit in ("d", "h", "min"):
        count, left_ms = divmod(left_ms, _UNITS_MS[unit])
        if count:
            parts.append(f"{count} {unit}")
    if left_ms or not parts:
        parts.append(f"{left_ms / 1000:g} s")
    return " ".join(parts)


def seconds_of(text: str) -> float:
    """Parse ``90``, ``1h30m`` or ``2d`` to seconds. Raises InvalidDueTime for any other text."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = _written(text.strip().lower())
    if not math.isfinite(seconds):
        raise InvalidDueTime(
            f"expected a duration in seconds, or such as 1h30m, 1h 30min or 2d, got {text!r}"
        )
    return seconds


def _written(text: str) -> float:
    found = _WRITTEN.fullmatch(text)
    if found is None or not any(found.groups()[1:]):
        return math.nan
    sign, *counts = found.groups()
    units_ms = zip(counts, _UNITS_MS.values(), strict=True)
    ms = sum(Decimal(count) * unit_ms for count, unit_ms in units_ms if count)
    return float(-ms / 1000 if sign else ms / 1000)
