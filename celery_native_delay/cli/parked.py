"""``delay parked list | requeue | purge``: messages that no binding led on."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import click

from .group import as_json_option, broker, command, delay, print_json, table, yes_option


@delay.group(name="parked")
def parked() -> None:
    """Matured messages whose destination was not there."""


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
    from amqp.exceptions import ResourceLocked

    from ..transports.rabbitmq.parking import count, peek

    with broker(ctx) as (delays, _):
        total = count(delays)
        try:
            found = peek(delays, limit=limit)
        except ResourceLocked as exc:
            raise click.ClickException("a worker is rescuing right now; try again") from exc
    rows = [_row(item) for item in found]
    if as_json:
        print_json({"parked": total, "messages": rows})
        return
    if rows:
        table(
            ("task", "id", "exchange", "routing key", "due"),
            [
                tuple(row[key] for key in ("task", "id", "exchange", "routing_key", "due"))
                for row in rows
            ],
        )
    click.echo(f"{total} parked message(s)")


def _row(item: Any) -> dict[str, Any]:
    headers = item.message.headers or {}
    delayed = item.delayed
    due = None
    if delayed is not None:
        due = datetime.fromtimestamp(delayed.due_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return {
        "task": headers.get("task"),
        "id": headers.get("id"),
        "exchange": delayed.exchange if delayed else None,
        "routing_key": delayed.routing_key if delayed else None,
        "due": due,
    }


@command(group=parked, name="requeue")
@as_json_option
def requeue(ctx: click.Context, as_json: bool) -> None:
    """Send parked messages to where they belong; what nobody wants yet stays parked."""
    from ..transports.rabbitmq.parking import rescue

    with broker(ctx) as (delays, _):
        outcome = rescue(delays)
    if outcome is None:
        raise click.ClickException("a worker is rescuing right now; try again")
    if as_json:
        print_json(asdict(outcome))
    else:
        click.echo(str(outcome))


@command(group=parked, name="purge")
@yes_option
@as_json_option
def purge_parked(ctx: click.Context, force: bool, as_json: bool) -> None:
    """Throw away all parked messages of this namespace. Cannot be undone."""
    from amqp.exceptions import NotFound

    with broker(ctx) as (delays, _):
        queue = delays.topology.parking_queue
        if not force:
            click.confirm(f"Throw away all messages in {queue}?", abort=True)
        try:
            purged = delays.declarer.queue_purge(queue)
        except NotFound:
            purged = 0
    if as_json:
        print_json({"purged": purged})
    else:
        click.echo(f"{purged} parked message(s) thrown away")
