"""Formats and parses durations as people write them, such as ``1 h 10 min``."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal

from .errors import InvalidDueTime

DAY_US = 86_400_000_000

_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "min": 60_000, "s": 1000}

#: Each pair (A, B): a duration of at least A ms is rounded to a multiple of B ms.
_STEPS_MS = ((86_400_000, 3_600_000), (3_600_000, 60_000), (10_000, 1000), (1000, 100), (0, 1))

_DAYS = ("today", "tomorrow")

_NUMBER = r"(\d+(?:\.\d+)?)\s*"

#: A duration as people write it, the largest unit first.
_WRITTEN = re.compile(
    rf"([+-]?)\s*(?:{_NUMBER}d(?:ays?)?)?\s*(?:{_NUMBER}h(?:ours?)?)?"
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


def moment_of(text: str, now: datetime) -> datetime:
    """Parse ``1h30m`` (from *now*), ``tomorrow 09:00`` or ISO 8601 to a time.

    Args:
        text: a duration in seconds or with units, ``today`` or ``tomorrow`` and a time of day, or
            ISO 8601. A time without an offset is in the time zone of *now*.
        now: the present time, with a time zone.

    Raises:
        InvalidDueTime: for any other text, and for a time too far away.
    """
    try:
        then = now.astimezone(UTC) + timedelta(seconds=seconds_of(text))
        return then.astimezone(now.tzinfo)  # the clocks may change in between
    except OverflowError:
        raise InvalidDueTime(f"{text} from now is too far away") from None
    except InvalidDueTime:
        pass
    day, _, clock = text.strip().lower().partition(" ")
    try:
        if day in _DAYS:
            day_then = now.date() + timedelta(days=_DAYS.index(day))
            return datetime.combine(day_then, time.fromisoformat(clock.strip()), now.tzinfo)
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidDueTime(
            "expected a duration from now such as 90 or 1h30m, tomorrow 09:00, or ISO 8601, got "
            f"{text!r}"
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=now.tzinfo)


def _written(text: str) -> float:
    found = _WRITTEN.fullmatch(text)
    if found is None or not any(found.groups()[1:]):
        return math.nan
    sign, *counts = found.groups()
    units_ms = zip(counts, _UNITS_MS.values(), strict=True)
    ms = sum(Decimal(count) * unit_ms for count, unit_ms in units_ms if count)
    return float(-ms / 1000 if sign == "-" else ms / 1000)
