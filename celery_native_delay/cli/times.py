"""Arguments and options that take a time: a duration (``90``, ``1h30m``, ``2d``) or a moment."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import click


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A duration, as a number of seconds."""

    name = "duration"

    def __init__(self, *, at_least: float | None = None) -> None:
        self._at_least = at_least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        from ..durations import duration, seconds_of
        from ..errors import InvalidDueTime

        try:
            seconds = seconds_of(str(value))
        except InvalidDueTime as exc:
            self.fail(str(exc), param, ctx)
        if self._at_least is not None and seconds < self._at_least:
            self.fail(f"expected {duration(self._at_least)} at least, got {value}", param, ctx)
        return seconds


class Moment(click.ParamType):  # type: ignore[type-arg]
    """A point in time: a duration from now, below 0 for the past, or ISO 8601; UTC without zone."""

    name = "duration|time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        from ..durations import seconds_of
        from ..errors import InvalidDueTime

        try:
            return datetime.now(UTC) + timedelta(seconds=seconds_of(value))
        except OverflowError:
            self.fail(f"{value} from now is beyond every calendar", param, ctx)
        except InvalidDueTime:
            pass
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            self.fail(
                f"expected a duration from now such as 90 or 1h30m, or ISO 8601, got {value!r}",
                param,
                ctx,
            )
        return found if found.tzinfo else found.replace(tzinfo=UTC)
