"""The commands ``delay schedules``: list, pause, run, add, change, remove and import entries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click

from ..texts import table
from .group import Json, as_json_option, command, confirm, delay_of, local, say, yes_option

_HEADINGS = ("name", "task", "schedule", "last run", "next due", "runs", "from")

_args = click.option("--args", type=Json(list), help="The arguments, such as '[7]'.")
_kwargs = click.option("--kwargs", type=Json(dict), help="""Such as '{"user": 7}'.""")
_options = click.option("--options", type=Json(dict), help="""Such as '{"queue": "slow"}'.""")


@command(name="schedules", cls=click.Group, invoke_without_command=True)
@click.option("--remove-all", is_flag=True, help="Remove all entries and waiting runs.")
@yes_option
@as_json_option
def schedules(ctx: click.Context, remove_all: bool, force: bool, as_json: bool) -> None:
    """List the schedule entries.

    The last column says whose an entry is: "code" for the configuration of the app, "added" for an
    entry that was added at run time.
    """
    if ctx.invoked_subcommand is not None:
        return
    found = delay_of(ctx).schedules()
    if remove_all:
        if not force:
            confirm("Remove all schedule entries, also those that were added, and their runs?")
        removed = found.remove_all()
        say(as_json, {"removed": removed}, f"{removed} schedule entries removed")
        return
    entries = list(found)
    rows = [
        (
            entry.name,
            entry.task,
            entry.schedule,
            _local(ctx, entry.last_run),
            entry.problem or ("paused" if entry.is_paused else _local(ctx, entry.next_due)),
            entry.runs,
            "added" if entry.is_added else "code",
        )
        for entry in entries
    ]
    none = "no schedule entries: a worker with native_delay_schedules publishes them"
    text = table(_HEADINGS, rows) if rows else none
    say(as_json, [entry.as_json() for entry in entries], text)


@command(group=schedules)
@click.argument("name")
@as_json_option
def pause(ctx: click.Context, name: str, as_json: bool) -> None:
    """Pause the entry NAME until it is resumed."""
    _changed(ctx, "pause", name, as_json, "paused")


@command(group=schedules)
@click.argument("name")
@as_json_option
def resume(ctx: click.Context, name: str, as_json: bool) -> None:
    """Resume the entry NAME."""
    _changed(ctx, "resume", name, as_json, "resumed")


@command(group=schedules, name="run-now")
@click.argument("name")
@as_json_option
def run_now(ctx: click.Context, name: str, as_json: bool) -> None:
    """Run the task of the entry NAME once more. The next due time stays."""
    with _names_told():
        task_id = delay_of(ctx).schedules().run_now(name)
    say(as_json, {"name": name, "task_id": task_id}, f"{name} sent now, as task {task_id}")


@command(group=schedules)
@click.argument("name")
@click.argument("task")
@click.argument("schedule")
@_args
@_kwargs
@_options
@as_json_option
def add(ctx: click.Context, name: str, as_json: bool, **fields: Any) -> None:
    """Add the entry NAME, which runs TASK by SCHEDULE.

    SCHEDULE is a text as the list shows it: 'every 10 s', or the five fields of a crontab, also
    with a time zone behind them. The entry stays until it is removed, also after deployments.
    """
    given = {key: each for key, each in fields.items() if each is not None}
    _changed(ctx, "add", name, as_json, "added", **given)


@command(group=schedules)
@click.argument("name")
@click.option("--task", help="The name of the task.")
@click.option("--schedule", help="A text as in `add`.")
@_args
@_kwargs
@_options
@as_json_option
def change(ctx: click.Context, name: str, as_json: bool, **fields: Any) -> None:
    """Change the entry NAME, which was added at run time. Options left out keep their values."""
    if all(each is None for each in fields.values()):
        raise click.UsageError("give --task, --schedule, --args, --kwargs or --options")
    _changed(ctx, "change", name, as_json, "changed", **fields)


@command(group=schedules)
@click.argument("name")
@yes_option
@as_json_option
def remove(ctx: click.Context, name: str, force: bool, as_json: bool) -> None:
    """Remove the entry NAME, which was added at run time, and its waiting run."""
    if not force:
        confirm(f"Remove the schedule entry {name}?")
    _changed(ctx, "remove", name, as_json, "removed")


@command(group=schedules, name="import")
@click.argument("source", type=click.Choice(["redbeat", "django-celery-beat"]))
@click.option("--dry-run", is_flag=True, help="Only show what would be imported.")
@as_json_option
def import_(ctx: click.Context, source: str, dry_run: bool, as_json: bool) -> None:
    """Add the entries that RedBeat or django-celery-beat keep, once. Nothing is removed there.

    Entries whose name is already known are left out, so the command may be repeated.
    """
    from ..app.importing import imported

    found = imported(ctx.obj.app, delay_of(ctx).schedules(), source, dry_run=dry_run)
    done = "would be added" if dry_run else "added"
    rows = [
        (each.name, each.task, each.schedule, each.problem or done + " paused" * each.is_paused)
        for each in found
    ]
    count = sum(each.problem is None for each in found)
    text = f"{count} of {len(found)} schedule entries of {source} {done}"
    shown = table(("name", "task", "schedule", "outcome"), rows) + "\n" if rows else ""
    entries = [each._asdict() for each in found]
    say(as_json, {"count": count, "dry_run": dry_run, "entries": entries}, shown + text)


@contextmanager
def _names_told() -> Iterator[None]:
    """Show the error for an unknown name, which names the known ones."""
    try:
        yield
    except KeyError as exc:
        raise click.ClickException(str(exc.args[0])) from exc


def _changed(
    ctx: click.Context, verb: str, name: str, as_json: bool, done: str, **fields: Any
) -> None:
    with _names_told():
        getattr(delay_of(ctx).schedules(), verb)(name, **fields)
    say(as_json, {"name": name, "task_id": None}, f"{name} {done}")


def _local(ctx: click.Context, moment: datetime | None) -> str | None:
    return None if moment is None else local(ctx, moment)
