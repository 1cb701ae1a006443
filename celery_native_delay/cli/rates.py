"""``delay rates``: the lines in which rated tasks wait for their turn."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from .group import as_json_option, command, installed_settings, say, table

if TYPE_CHECKING:
    from ..rates.line import RateLine

#: So many lines are looked at at least: the longest in time need not have most waiting.
_LOOKED_AT = 500

_HEADINGS = ("task", "key", "rate", "waiting", "next slot", "utilisation", "held")


@command(name="rates")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Show at most this many lines.",
)
@as_json_option
def rates(ctx: click.Context, limit: int, as_json: bool) -> None:
    """Show the lines of rated tasks, those with most waiting first.

    The next slot is when the first in a line may start; utilisation, how much of its rate was used
    in the last period. A line that a task's RetryAfter holds says for how long.
    """
    from ..app.delay import Delay

    chosen = installed_settings(ctx)
    lines = Delay(ctx.obj.app).rates(limit=max(limit + 1, _LOOKED_AT))
    more, lines = len(lines) > limit, lines[:limit]
    text = shown(lines, more, datetime.now(UTC)) if lines else _none(bool(chosen.rates))
    say(as_json, {"lines": [line.as_json() for line in lines], "more": more}, text)


def shown(lines: Sequence[RateLine], more: bool, now: datetime) -> str:
    """Text of *lines* as a table; with *more* there are others."""
    rows = [
        (
            line.task,
            line.key,
            line.rate,
            line.waiting,
            _until(line.next_slot_us, now),
            f"{line.utilisation:.0%}".replace("%", " %"),
            _until(line.held_until_us, now),
        )
        for line in lines
    ]
    waiting = sum(line.waiting for line in lines)
    others = "; there are more, which --limit shows" if more else ""
    return f"{table(_HEADINGS, rows)}\n{waiting:,} waiting in {len(lines):,} line(s){others}"


def _until(moment_us: int | None, now: datetime) -> str | None:
    from ..durations import duration

    if moment_us is None:
        return None
    seconds = moment_us / 1_000_000 - now.timestamp()
    return duration(seconds) if seconds > 0 else "now"


def _none(rated: bool) -> str:
    if rated:
        return "no lines: no rated task has come lately"
    return "no lines: no task of this app has a rate, see native_delay_rates"
