"""The commands ``delay runs``: list, cancel and reschedule what Spark fan-outs have sent."""

from __future__ import annotations

import click

from ..texts import table
from .group import (
    Duration,
    as_json_option,
    command,
    confirm,
    installed_settings,
    limit_option,
    local,
    say,
    yes_option,
)

_HEADINGS = ("run", "task", "began", "tries", "planned", "sent", "rejected", "waiting", "state")


@command(name="runs", cls=click.Group, invoke_without_command=True)
@limit_option
@as_json_option
def runs(ctx: click.Context, limit: int, as_json: bool) -> None:
    """List the runs of Spark fan-outs, those with the latest tasks first.

    `delay ls --search run:NAME` lists the waiting tasks of a run.
    """
    if ctx.invoked_subcommand is not None:
        return
    from ..app.runs import runs_of

    installed_settings(ctx)
    found = runs_of(ctx.obj.app, limit)
    rows = [
        (
            each.run_id,
            each.task,
            local(ctx, each.began),
            each.tries,
            each.planned,
            each.sent,
            each.rejected,
            "?" if each.waiting is None else each.waiting,
            "cancelled" if each.cancelled else "",
        )
        for each in found
    ]
    text = table(_HEADINGS, rows) if rows else "no run of a Spark fan-out is known"
    say(as_json, [each.as_json() for each in found], text)


@command(group=runs, name="cancel")
@click.argument("run_id", metavar="RUN")
@yes_option
@as_json_option
def cancel(ctx: click.Context, run_id: str, force: bool, as_json: bool) -> None:
    """Cancel all tasks of RUN: workers announce them as revoked when they are due."""
    from ..app.runs import Run

    installed_settings(ctx)
    if not force:
        confirm(f"Cancel all tasks of run {run_id} that have not started?")
    Run(run_id, app=ctx.obj.app).cancel()
    say(as_json, {"run_id": run_id, "cancelled": True}, f"run {run_id} is cancelled")


@command(group=runs, name="reschedule")
@click.argument("run_id", metavar="RUN")
@click.option("--by", type=Duration(), required=True, help="Later by: seconds, or such as 1h30m.")
@yes_option
@as_json_option
def reschedule(ctx: click.Context, run_id: str, by: float, force: bool, as_json: bool) -> None:
    """Move the due times of all waiting tasks of RUN."""
    from ..app.runs import Run

    installed_settings(ctx)
    if not force:
        confirm(f"Reschedule all waiting tasks of run {run_id}?")
    moved = Run(run_id, app=ctx.obj.app).reschedule(by=by)
    say(as_json, {"run_id": run_id, "moved": moved}, f"{moved:,} task(s) moved")
