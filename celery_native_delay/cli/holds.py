"""The commands ``delay hold``, ``drop``, ``release`` and ``holds``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from ..texts import printable, table
from .group import (
    Duration,
    as_json_option,
    command,
    confirm,
    delay_of,
    local,
    print_json,
    progress_bar,
    say,
    yes_option,
)
from .waiting import all_of

_HEADINGS = ("name", "mode", "by", "since", "until", "held")

_named = all_of(
    click.argument("task", metavar="TASK"),
    click.option("--key", help="Only tasks with this key of a rate, debounce or unique."),
    click.option("-s", "--search", default="", help="Only tasks that match, as in `ls`."),
)


@command(name="hold")
@_named
@click.option("--for", "seconds", type=Duration(), help="Such as 2h; or until `release`.")
@as_json_option
def hold(ctx: click.Context, as_json: bool, **chosen: Any) -> None:
    """Start no more tasks named TASK, such as shop.call_api or shop.*, until `release`.

    Workers follow within 5 seconds. Held tasks wait in the store. Tasks that run go on.
    """
    made = delay_of(ctx).hold(**chosen)
    say(as_json, made.as_json(), printable(f"{made.name} held: `delay release` ends it"))


@command(name="drop")
@_named
@yes_option
@as_json_option
def drop(ctx: click.Context, as_json: bool, force: bool, **chosen: Any) -> None:
    """Revoke tasks named TASK, such as shop.*, instead of starting them, until `release`.

    Workers follow within 5 seconds. Held tasks with the same TASK, --key and --search go, too.
    """
    if not force:
        confirm(f"Throw away every task {printable(chosen['task'])} from now on?")
    made = delay_of(ctx).drop(**chosen)
    say(as_json, made.as_json(), printable(f"{made.name} dropped: `delay release` ends it"))


@command(name="release")
@_named
@click.option("--rate", help='Start so many tasks, such as "50/s". Without it, all at once.')
@as_json_option
def release(ctx: click.Context, as_json: bool, **chosen: Any) -> None:
    """End a hold, a drop or a pause of RetryAfter. Held tasks run, oldest first.

    Give TASK, --key and --search as `holds` shows them. If this command dies, run it again.
    """
    with progress_bar("releasing") as progress:
        released = delay_of(ctx).release(**chosen, progress=progress)
    say(as_json, {"released": released}, f"{released:,} task(s) released")


@command(name="holds")
@as_json_option
def holds(ctx: click.Context, as_json: bool) -> None:
    """Show the holds and drops: who made each, since and until when, and how many tasks wait.

    "ended" are tasks that an interrupted `release` has left: release them again.
    """
    found = delay_of(ctx).holds()

    def time_of(moment_us: int | None) -> str | None:
        if moment_us is None:
            return None
        return local(ctx, datetime.fromtimestamp(moment_us / 1_000_000, UTC))

    if as_json:
        print_json([each.as_json() for each in found])
        return
    rows = [
        (each.name, each.mode, each.by, time_of(each.since_us), time_of(each.until_us), each.held)
        for each in found
    ]
    click.echo(table(_HEADINGS, rows) if rows else "nothing is held")
