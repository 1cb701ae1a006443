"""``delay declare | verify | status | purge``: the delay levels on the broker."""

from __future__ import annotations

from dataclasses import asdict

import click

from .group import as_json_option, broker, command, print_json, settings, table, yes_option


@command(name="declare")
@as_json_option
def declare(ctx: click.Context, as_json: bool) -> None:
    """Declare the delay levels, and bind the app's queues."""
    with broker(ctx) as (delays, connection):
        for queue in ctx.obj.app.amqp.queues.values():
            queue(connection.default_channel).declare()
        prepared = delays.prepare(redeclare=True, consuming=True)
        if as_json:
            print_json({"name": delays.topology.name} | asdict(prepared))
        else:
            click.echo(
                f"declared {delays.topology.name} and {prepared.mirrored} binding(s) "
                f"in {prepared.seconds * 1000:.0f} ms"
            )


@command(name="verify")
@as_json_option
def verify(ctx: click.Context, as_json: bool) -> None:
    """Compare the broker with the plan; exit 1 on any difference."""
    from ..transports.rabbitmq.inspection import verify as compare
    from ..transports.rabbitmq.management import management_of

    with broker(ctx) as (delays, connection):
        found = compare(delays, management_of(connection, settings(ctx)))
        if as_json:
            print_json({"name": delays.topology.name} | asdict(found))
        else:
            for difference in found.differences:
                click.echo(difference)
            for sentence in found.unchecked:
                click.echo(f"unchecked: {sentence}", err=True)
            for sentence in found.advice:
                click.echo(f"advice: {sentence}", err=True)
            if not found.differences:
                click.echo(f"{delays.topology.name}: as planned")
        ctx.exit(1 if found.differences else 0)


@command(name="status")
@as_json_option
def status(ctx: click.Context, as_json: bool) -> None:
    """Show what waits: levels, depth, next due, parked, stuck in dead-lettering."""
    from ..transports.rabbitmq.inspection import status as count
    from ..transports.rabbitmq.management import management_of

    with broker(ctx) as (delays, connection):
        found = count(delays, management_of(connection, settings(ctx)))
    if as_json:
        print_json(found.as_json())
        return
    missing = [level.queue for level in found.levels if level.waiting is None]
    if missing:
        click.echo(f"{len(missing)} level queue(s) are not declared, such as {missing[0]}")
    table(
        ("level queue", "ttl s", "waiting", "stuck"),
        [
            (
                level.queue,
                level.ttl_seconds,
                level.waiting,
                "?" if level.stuck is None else level.stuck,
            )
            for level in found.levels
            if level.waiting or level.stuck
        ],
    )
    for landing in found.landings:
        click.echo(f"{landing.queue} holds {landing.held}: its destination takes none of them")
    due = found.next_due_within_seconds
    click.echo(f"waiting   {found.waiting}")
    click.echo(f"next due  {'-' if due is None else f'within {due:g} s'}")
    click.echo(f"parked    {found.parked}")
    stuck = found.stuck
    click.echo(f"stuck     {'unknown (management API not reachable)' if stuck is None else stuck}")


@command(name="purge")
@yes_option
@as_json_option
def purge(ctx: click.Context, force: bool, as_json: bool) -> None:
    """Throw away what waits in this app's delay levels. Cannot be undone.

    What is parked, or held by a landing queue, stays.
    """
    from amqp.exceptions import NotFound

    with broker(ctx) as (delays, _):
        name = delays.topology.name
        if not force:
            click.confirm(f"Throw away all that waits in {name}?", abort=True)
        purged = 0
        for hop in delays.topology.level_queues:
            try:
                purged += delays.declarer.queue_purge(hop.queue)
            except NotFound:
                continue
        if as_json:
            print_json({"name": name, "purged": purged})
        else:
            click.echo(f"{purged} delayed message(s) thrown away")
