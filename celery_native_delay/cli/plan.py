"""The command ``delay plan``: show a message's path through the delay queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import click

from ..texts import table
from .group import Duration, as_json_option, command, fitting_connection, say, settings

if TYPE_CHECKING:
    from ..transports.rabbitmq.topology import Topology

#: On SQS, the largest number of waits of one message that the path lists.
_SHOWN = 10

#: The value to print as JSON, and the lines to print as text.
_Told: TypeAlias = tuple[dict[str, Any], list[str]]


@command(name="plan")
@click.argument("seconds", type=Duration(), metavar="DURATION")
@click.option("--queue", default="celery", show_default=True, help="The destination queue.")
@click.option(
    "--transport", type=click.Choice(["rabbitmq", "sqs"]), help="Plan for this broker instead."
)
@as_json_option
def plan(
    ctx: click.Context,
    seconds: float,
    queue: str,
    transport: str | None,
    as_json: bool,
) -> None:
    """Show the path of a delayed message through the delay queues. Needs no broker.

    The path lists each hop: one delay queue, or on SQS one wait of up to 15 minutes.
    """
    from ..due_time import check_countdown
    from ..transports.rabbitmq.topology import Topology

    chosen = settings(ctx)
    check_countdown(seconds, longest_delay_seconds=chosen.longest_delay_seconds)
    apps: Any = None if transport else fitting_connection(ctx, chosen).transport
    on_sqs = transport == "sqs" or getattr(apps, "driver_type", "") == "sqs"
    if on_sqs:
        report, lines = _hops(seconds, queue)
    elif hasattr(apps, "waits_in"):
        key, waits = apps.waits_in(chosen), max(round(seconds, 6), 0)
        report = {"waits_seconds": waits, "key": key, "hops": []}
        lines = [_waits(seconds, waits, f"in {key}", queue)]
    else:
        report, lines = _levels(Topology(chosen), seconds, queue)
    say(as_json, {"delay_seconds": seconds, **report}, "\n".join(lines))


def _levels(topology: Topology, seconds: float, queue: str) -> _Told:
    """Return the path of one message through RabbitMQ's delay queues."""
    from ..due_time import units_until
    from ..durations import duration
    from ..transports.rabbitmq.address import message_address

    resolution_ms = topology.settings.resolution_ms
    units = units_until(round(seconds * 1_000_000), now_us=0, resolution_ms=resolution_ms)
    hops = [(hop.queue, hop.delay_ms / 1000) for hop in topology.path(units)]
    waits = units * resolution_ms / 1000
    entry = topology.entry_exchange(units) if units else ""
    key = topology.routing_key(units, message_address("", queue)) if units else queue
    report = {
        "waits_seconds": waits,
        "exchange": entry,
        "routing_key": key,
        "hops": [{"queue": level, "ttl_seconds": ttl} for level, ttl in hops],
    }
    rows = [(level, duration(ttl, exact=True)) for level, ttl in hops]
    return report, [
        _waits(seconds, waits, f"in {len(hops)} hop(s)", queue),
        table(("level queue", "waits"), rows),
        f"published to  {entry or '(default exchange)'}",
        f"routing key   {key}",
    ]


def _hops(seconds: float, queue: str) -> _Told:
    """Return the path of one message through SQS, 15 minutes at a time."""
    from ..due_time import milliseconds_up
    from ..durations import duration
    from ..transports.sqs.hops import HOP_SECONDS, REQUESTS_PER_HOP, remainders

    waits, *rest = remainders(milliseconds_up(round(max(seconds, 0) * 1_000_000)))
    requests = 1 + len(rest) * REQUESTS_PER_HOP
    report = {"waits_seconds": waits, "hop_count": len(rest), "requests": requests}
    where = f"in {len(rest):,} hop(s) of {duration(HOP_SECONDS)}, {requests:,} request(s)"
    lines = [_waits(seconds, waits, where, queue)]
    if len(rest) < _SHOWN:
        names = [f"{queue}-delay.fifo"] * len(rest) + [queue]
        left = [duration(each, exact=True) for each in (waits, *rest)]
        lines.append(table(("sent to", "left"), list(zip(names, left, strict=True))))
    return report, lines


def _waits(seconds: float, waits_seconds: float, where: str, queue: str) -> str:
    from ..durations import duration

    asked, kept = duration(seconds, exact=True), duration(waits_seconds, exact=True)
    return f"{asked} waits {kept} {where}, then goes to {queue!r}"
