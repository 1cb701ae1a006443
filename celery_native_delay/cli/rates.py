"""The commands ``delay rates``: show waiting rate-limited tasks, and change the limit of a key."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ..texts import table
from .group import as_json_option, command, installed_settings, limit_option, say

if TYPE_CHECKING:
    from ..rates.line import RateLine

key_option = click.option("--key", help="The key. Leave it out for tasks without a key.")
_HEADINGS = ("task", "key", "rate", "waiting", "next slot", "utilisation", "held")


@command(name="rates", cls=click.Group, invoke_without_command=True)
@limit_option
@as_json_option
def rates(ctx: click.Context, limit: int, as_json: bool) -> None:
    """Show the lines of rate-limited tasks: the waiting tasks of each task name and key.

    The longest line comes first. A rate with "*" differs from the rate in the settings. "next slot"
    is the time until the next task of the line may start. "utilisation" is the number of recent
    starts in percent of the limit: 50 starts within the last minute are 50 % of the rate 100/m.
    "held" is the time until the end of a pause that RetryAfter began.
    """
    if ctx.invoked_subcommand is not None:
        return
    from ..app.delay import Delay

    chosen = installed_settings(ctx)
    lines = Delay(ctx.obj.app).rates(limit=limit + 1)
    more, lines = len(lines) > limit, lines[:limit]
    if lines:
        text = shown(lines, more, datetime.now(UTC))
    elif chosen.rates:
        text = "no rate-limited task has come lately"
    else:
        text = "no task of this app has a rate: see native_delay_rates"
    say(as_json, {"lines": [line.as_json() for line in lines], "more": more}, text)


@command(group=rates, name="set")
@click.argument("name")
@click.argument("limit")
@key_option
@as_json_option
def set_(ctx: click.Context, name: str, limit: str | None, key: str | None, as_json: bool) -> None:
    """Set the rate limit of one key to LIMIT, such as 500/m, in all workers.

    NAME is the name of the rate: by default, the task's name.
    """
    from ..app.delay import Delay

    moved = Delay(ctx.obj.app).set_rate(name, key, limit)
    text = f"set to {limit}" if limit else "the limit in native_delay_rates applies again"
    found = {"name": name, "key": key, "limit": limit, "moved": moved}
    say(as_json, found, f"{text}; {moved:,} waiting task(s) moved")


@command(group=rates)
@click.argument("name")
@key_option
@as_json_option
def unset(ctx: click.Context, name: str, **options: Any) -> None:
    """Set the rate limit of one key to the limit in the settings again; NAME is as in `set`."""
    ctx.invoke(set_, name=name, limit=None, **options)


def shown(lines: Sequence[RateLine], more: bool, now: datetime) -> str:
    """Return a text table of *lines*. A line is the waiting tasks with the same rate and key.

    If *more* is True, the text says that ``--limit`` hides further lines.
    """
    rows = [
        (
            line.task,
            line.key,
            f"{line.rate} *" if line.overridden else line.rate,
            line.waiting,
            _until(line.next_slot_us, now),
            f"{line.utilisation:.0%}".replace("%", " %"),
            _until(line.held_until_us, now),
        )
        for line in lines
    ]
    waiting = sum(line.waiting for line in lines)
    total = f"{waiting:,} task(s) waiting in {len(lines):,} line(s)"
    others = "; there are more: raise --limit" if more else ""
    return f"{table(_HEADINGS, rows)}\n{total}{others}"


def _until(moment_us: int | None, now: datetime) -> str | None:
    from ..durations import duration

    if moment_us is None:
        return None
    seconds = moment_us / 1_000_000 - now.timestamp()
    return duration(seconds) if seconds > 0 else "now"
