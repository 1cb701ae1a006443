"""``delay plan``: the way of a delay through the levels, without a broker."""

from __future__ import annotations

import click

from .group import as_json_option, command, print_json, settings, table


@command(name="plan")
@click.argument("seconds", type=float)
@click.option("--queue", default="celery", show_default=True, help="The destination queue.")
@as_json_option
def plan(ctx: click.Context, seconds: float, queue: str, as_json: bool) -> None:
    """Show the path, hops and routing key of a delay of SECONDS. Needs no broker."""
    from ..core.address import message_address
    from ..core.due_time import check_countdown, units_until
    from ..core.topology import Topology

    chosen = settings(ctx)
    check_countdown(seconds, longest_delay_seconds=chosen.longest_delay_seconds)
    transport = ctx.obj.app.connection_for_write().transport
    if hasattr(transport, "waits_in"):
        _plan_without_levels(transport.waits_in(chosen), seconds, queue, as_json)
        return
    topology = Topology(chosen)
    units = units_until(round(seconds * 1_000_000), now_us=0, resolution_ms=chosen.resolution_ms)
    hops = topology.path(units)
    waits = units * chosen.resolution_ms / 1000
    entry = topology.entry_exchange(units) if units else ""
    key = topology.routing_key(units, message_address("", queue)) if units else queue
    if as_json:
        print_json(
            {
                "delay_seconds": seconds,
                "waits_seconds": waits,
                "exchange": entry,
                "routing_key": key,
                "hops": [{"queue": hop.queue, "ttl_seconds": hop.ttl_ms / 1000} for hop in hops],
            }
        )
        return
    click.echo(f"{seconds:g} s waits {waits:g} s in {len(hops)} hop(s), then goes to {queue!r}")
    rows = [(hop.queue, hop.ttl_ms / 1000) for hop in hops]
    click.echo(table(("level queue", "waits s"), rows))
    click.echo(f"published to  {entry or '(default exchange)'}")
    click.echo(f"routing key   {key}")


def _plan_without_levels(key: str, seconds: float, queue: str, as_json: bool) -> None:
    """Redis keeps a message in one place until it is due, to the microsecond."""
    waits = max(round(seconds, 6), 0)
    if as_json:
        print_json({"delay_seconds": seconds, "waits_seconds": waits, "key": key, "hops": []})
    else:
        click.echo(f"{seconds:g} s waits {waits:g} s in {key}, then goes to {queue!r}")
