"""The command ``delay schedules``: lists, pauses, resumes and runs schedule entries."""

from __future__ import annotations

from datetime import datetime

import click

from .group import as_json_option, command, delay_of, local, say, table

_HEADINGS = ("name", "task", "schedule", "last run", "next due", "runs")


@command(name="schedules")
@click.argument("action", type=click.Choice(["pause", "resume", "run-now"]), required=False)
@click.argument("name", required=False)
@click.option("--remove-all", is_flag=True, help="Remove all entries and waiting occurrences.")
@as_json_option
def schedules(
    ctx: click.Context, action: str | None, name: str | None, remove_all: bool, as_json: bool
) -> None:
    """List the schedule entries, or pause, resume or run the entry NAME.

    A paused entry does not run until it is resumed. run-now runs the task once more; the next due
    time does not change.
    """
    found = delay_of(ctx).schedules()
    if remove_all:
        removed = found.remove_all()
        say(as_json, {"removed": removed}, f"{removed} schedule entries removed")
    elif action is None:
        entries = list(found)
        rows = [
            (
                entry.name,
                entry.task,
                entry.schedule,
                _local(ctx, entry.last_run),
                entry.problem or ("paused" if entry.is_paused else _local(ctx, entry.next_due)),
                entry.runs,
            )
            for entry in entries
        ]
        none = "no schedule entries: a worker with native_delay_schedules publishes them"
        text = table(_HEADINGS, rows) if rows else none
        say(as_json, [entry.as_json() for entry in entries], text)
    elif name is None:
        raise click.UsageError(f"expected the name of an entry: delay schedules {action} NAME")
    else:
        try:
            task_id = getattr(found, action.replace("-", "_"))(name)
        except KeyError as exc:
            raise click.ClickException(str(exc.args[0])) from exc
        done = f"sent now, as task {task_id}" if task_id else f"{action}d"
        say(as_json, {"name": name, "task_id": task_id}, f"{name} {done}")


def _local(ctx: click.Context, moment: datetime | None) -> str | None:
    return None if moment is None else local(ctx, moment)
