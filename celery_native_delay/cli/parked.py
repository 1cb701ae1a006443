"""``delay parked list | requeue | purge``: messages that could not be delivered when due."""

from __future__ import annotations

from dataclasses import asdict, astuple

import click

from .group import as_json_option, broker, command, confirm, delay, say, table, yes_option


@delay.group(name="parked")
def parked() -> None:
    """Messages that were due, and whose destination was not there."""


@command(group=parked, name="list")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Show at most this many.",
)
@as_json_option
def list_parked(ctx: click.Context, limit: int, as_json: bool) -> None:
    """Show parked messages; they stay where they are."""
    with broker(ctx) as part:
        found = part.parked(limit=limit)
    if found is None:
        raise click.ClickException("a worker is rescuing right now; try again")
    total, tasks = found
    lines = [f"{total} parked message(s)"]
    if tasks:
        headings = ("task", "id", "exchange", "routing key", "due")
        lines.insert(0, table(headings, [astuple(task) for task in tasks]))
    value = {"parked": total, "messages": [asdict(task) for task in tasks]}
    say(as_json, value, "\n".join(lines))


@command(group=parked, name="requeue")
@as_json_option
def requeue(ctx: click.Context, as_json: bool) -> None:
    """Send parked messages to where they belong; what no queue takes yet stays parked."""
    with broker(ctx) as part:
        outcome = part.requeue()
    if outcome is None:
        raise click.ClickException("a worker is rescuing right now; try again")
    say(as_json, asdict(outcome), str(outcome))


@command(group=parked, name="purge")
@yes_option
@as_json_option
def purge_parked(ctx: click.Context, force: bool, as_json: bool) -> None:
    """Throw away all parked messages of this namespace. Cannot be undone."""
    with broker(ctx) as part:
        if not force:
            confirm(f"Throw away all messages in {part.parking}?")
        purged = part.purge_parked()
    say(as_json, {"purged": purged}, f"{purged} parked message(s) thrown away")
