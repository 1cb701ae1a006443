"""``delay plan``: what a delay, or a load of them, makes of the broker; without a broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .group import as_json_option, command, fitting_connection, print_json, settings, table
from .times import Duration

if TYPE_CHECKING:
    from ..settings import DelaySettings

#: Of the way through SQS so many sends are shown at most.
_SHOWN = 10


class _Range(click.ParamType):  # type: ignore[type-arg]
    """A duration, or all from one to another: two numbers of seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, float]:
        first, _, last = str(value).partition("..")
        seconds = Duration(at_least=0)
        found = seconds.convert(first, param, ctx), seconds.convert(last or first, param, ctx)
        if found[0] > found[1]:
            self.fail(f"expected FROM..TO with FROM before TO, got {value}", param, ctx)
        return found


@command(name="plan")
@click.argument("seconds", type=Duration(), metavar="[DURATION]", required=False)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Messages that are sent a second: what a load needs, instead of the way of one message.",
)
@click.option(
    "--delay",
    "delays",
    type=_Range(),
    multiple=True,
    metavar="DURATION[..DURATION]",
    help="With --rate: their delay, 60, 1h30m, or any from 1m..10m. Several are equally frequent.",
)
@click.option("--queue", default="celery", show_default=True, help="The destination queue.")
@click.option(
    "--transport", type=click.Choice(["rabbitmq", "sqs"]), help="Another broker than the app's."
)
@click.option(
    "--price-per-million",
    type=click.FloatRange(min=0),
    default=0.5,
    show_default=True,
    help="What a million requests to SQS cost.",
)
@as_json_option
def plan(
    ctx: click.Context,
    seconds: float | None,
    rate: float | None,
    delays: tuple[tuple[float, float], ...],
    queue: str,
    transport: str | None,
    price_per_million: float,
    as_json: bool,
) -> None:
    """Show the path, hops and routing key of a delay: of 90 seconds, or of 365d, 1h30m.

    On SQS also what it costs. With --rate and --delay: what a load makes of each level queue, how
    much waits, and in how much memory. Needs no broker.
    """
    from ..due_time import check_countdown, units_until
    from ..durations import duration
    from ..transports.rabbitmq.address import message_address
    from ..transports.rabbitmq.topology import Topology

    if (seconds is None) is (rate is None) or (rate is None) is bool(delays):
        raise click.UsageError("give a DURATION, or a load: --rate and --delay")
    chosen = settings(ctx)
    longest = max((last for _, last in delays), default=seconds or 0.0)
    check_countdown(longest, longest_delay_seconds=chosen.longest_delay_seconds)
    apps: Any = None if transport else fitting_connection(ctx, chosen).transport
    on_sqs = transport == "sqs" or getattr(apps, "driver_type", "") == "sqs"
    if seconds is None:
        assert rate is not None
        has_levels = not (on_sqs or hasattr(apps, "waits_in"))
        _plan_load(chosen, rate, delays, has_levels=has_levels, as_json=as_json)
        return
    if on_sqs:
        _plan_hops(seconds, queue, price_per_million, as_json)
        return
    if hasattr(apps, "waits_in"):
        _plan_without_levels(apps.waits_in(chosen), seconds, queue, as_json)
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
    click.echo(_waits(seconds, waits, f"in {len(hops)} hop(s)", queue))
    rows = [(hop.queue, duration(hop.ttl_ms / 1000, exact=True)) for hop in hops]
    click.echo(table(("level queue", "waits"), rows))
    click.echo(f"published to  {entry or '(default exchange)'}")
    click.echo(f"routing key   {key}")


def _plan_load(
    chosen: DelaySettings,
    rate: float,
    ranges: tuple[tuple[float, float], ...],
    *,
    has_levels: bool,
    as_json: bool,
) -> None:
    """Show what *rate* messages a second make of the broker; *has_levels*: it is RabbitMQ."""
    from ..durations import duration
    from ..transports.rabbitmq.load import CEILINGS, MEMORY_BYTES, Delays, queue_loads
    from ..transports.rabbitmq.topology import Topology

    delays = [Delays(*(round(end * 1_000_000) for end in ends)) for ends in ranges]
    waiting = rate * sum(one.mean_seconds for one in delays) / len(delays)
    told: dict[str, Any] = {"per_second": rate, "waiting": round(waiting)}
    said = " or ".join(
        " to ".join(duration(end, exact=True) for end in dict.fromkeys(ends)) for ends in ranges
    )
    lines = [f"{rate:,g} message(s) a second that wait {said}"]
    if has_levels:
        queues = queue_loads(Topology(chosen), rate, delays)
        hops = sum(one.per_second for one in queues) / rate
        memory_bytes = round(waiting * MEMORY_BYTES)
        told |= {
            "hops_per_message": hops,
            "memory_bytes": memory_bytes,
            "queues": [
                {
                    "queue": one.queue,
                    "ttl_seconds": one.ttl_seconds,
                    "per_second": one.per_second,
                    "waiting": round(one.waiting),
                }
                for one in queues
            ],
        }
        rows = [
            (
                one.queue,
                duration(one.ttl_seconds, exact=True),
                round(one.per_second, 1),
                round(one.waiting),
            )
            for one in queues
        ]
        lines += [
            f"{hops:.2f} hops each; {waiting:,.0f} wait, in {_bytes(memory_bytes)} of memory",
            table(("level queue", "waits", "a second", "waiting"), rows),
            f"compare: {CEILINGS}",
        ]
    else:
        lines.append(f"{waiting:,.0f} wait")
    if as_json:
        print_json(told)
    else:
        click.echo("\n".join(lines))


def _waits(seconds: float, waits_seconds: float, where: str, queue: str) -> str:
    from ..durations import duration

    asked, kept = duration(seconds, exact=True), duration(waits_seconds, exact=True)
    return f"{asked} waits {kept} {where}, then goes to {queue!r}"


def _plan_without_levels(key: str, seconds: float, queue: str, as_json: bool) -> None:
    """Show a delay on a broker that keeps a message in one place until it is due."""
    waits = max(round(seconds, 6), 0)
    if as_json:
        print_json({"delay_seconds": seconds, "waits_seconds": waits, "key": key, "hops": []})
    else:
        click.echo(_waits(seconds, waits, f"in {key}", queue))


def _plan_hops(seconds: float, queue: str, price_per_million: float, as_json: bool) -> None:
    """Show a delay on SQS, hop by hop: a relay sends the message on after each."""
    from ..durations import duration
    from ..transports.sqs.hops import HOP_SECONDS, Itinerary

    way = Itinerary.of(max(seconds, 0))
    alone, batched = way.requests, way.requests_in_batches
    if as_json:
        print_json(
            {
                "delay_seconds": seconds,
                "waits_seconds": way.waits_seconds,
                "hop_seconds": HOP_SECONDS,
                "hop_count": way.hops,
                "requests": alone,
                "requests_in_batches": batched,
                "price_per_million": price_per_million,
                "price": alone * price_per_million / 1e6,
                "price_in_batches": batched * price_per_million / 1e6,
            }
        )
        return
    hops = f"in {way.hops:,} hop(s) of {duration(HOP_SECONDS)}"
    click.echo(_waits(seconds, way.waits_seconds, hops, queue))
    if way.hops < _SHOWN:
        rows = [
            (f"{queue}-delay.fifo" if number < way.hops else queue, duration(left, exact=True))
            for number, left in enumerate(way.remainders)
        ]
        click.echo(table(("sent to", "left"), rows))
    prices = [f"{number * price_per_million / 1e6:.7f}" for number in (alone, batched)]
    costs = [("alone", f"{alone:,}", prices[0]), ("with nine others", f"{batched:,.1f}", prices[1])]
    click.echo(table(("travelling", "requests", f"at {price_per_million:g} per million"), costs))


def _bytes(number: float) -> str:
    exponent = min((len(f"{number:.0f}") - 1) // 3, 4)
    return f"{number / 1000**exponent:,.1f} {('B', 'kB', 'MB', 'GB', 'TB')[exponent]}"
