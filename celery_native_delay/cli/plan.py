"""The command ``delay plan``: show a message's path, or the load of the delay queues."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from .group import Duration, as_json_option, command, fitting_connection, say, settings, table

if TYPE_CHECKING:
    from ..transports.rabbitmq.topology import Topology

#: On SQS, the largest number of waits of one message that the path lists.
_SHOWN = 10

#: The value to print as JSON, and the lines to print as text.
_Told: TypeAlias = tuple[dict[str, Any], list[str]]


class _Range(click.ParamType):  # type: ignore[type-arg]
    """A click type for FROM..TO, in seconds; one duration alone is both FROM and TO."""

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
    help="Messages sent per second: show the load of all, not the path of one message.",
)
@click.option(
    "--delay",
    "delays",
    type=_Range(),
    multiple=True,
    metavar="DURATION[..DURATION]",
    help="With --rate: the delay, such as 60 or a range 1m..10m. Several are equally frequent.",
)
@click.option("--queue", default="celery", show_default=True, help="The destination queue.")
@click.option(
    "--transport", type=click.Choice(["rabbitmq", "sqs"]), help="Plan for this broker instead."
)
@as_json_option
def plan(
    ctx: click.Context,
    seconds: float | None,
    rate: float | None,
    delays: tuple[tuple[float, float], ...],
    queue: str,
    transport: str | None,
    as_json: bool,
) -> None:
    """Show the path of a delayed message through the delay queues. Needs no broker.

    The path lists each hop: one delay queue, or on SQS one wait of up to 15 minutes. With --rate
    and --delay, show the load: waiting messages, memory, and messages per second of each queue.
    """
    from ..due_time import check_countdown
    from ..transports.rabbitmq.topology import Topology

    if (seconds is None) is (rate is None) or (rate is None) is bool(delays):
        raise click.UsageError("give a DURATION, or a load: --rate and --delay")
    chosen = settings(ctx)
    longest = max((last for _, last in delays), default=seconds or 0.0)
    check_countdown(longest, longest_delay_seconds=chosen.longest_delay_seconds)
    apps: Any = None if transport else fitting_connection(ctx, chosen).transport
    on_sqs = transport == "sqs" or getattr(apps, "driver_type", "") == "sqs"
    topology = None if on_sqs or hasattr(apps, "waits_in") else Topology(chosen)
    if seconds is None:
        assert rate is not None
        report, lines = _load(topology, rate, delays)
    elif topology is not None:
        report, lines = _levels(topology, seconds, queue)
    elif on_sqs:
        report, lines = _hops(seconds, queue)
    else:
        key, waits = apps.waits_in(chosen), max(round(seconds, 6), 0)
        report = {"waits_seconds": waits, "key": key, "hops": []}
        lines = [_waits(seconds, waits, f"in {key}", queue)]
    if seconds is not None:
        report = {"delay_seconds": seconds, **report}
    say(as_json, report, "\n".join(lines))


def _load(topology: Topology | None, rate: float, ranges: tuple[tuple[float, float], ...]) -> _Told:
    """Return the load of the delay queues if *rate* messages per second are published."""
    from ..durations import duration
    from ..transports.rabbitmq.load import CEILINGS, MEMORY_BYTES, Delays, queue_loads

    delays = [Delays(*(round(end * 1_000_000) for end in ends)) for ends in ranges]
    waiting = rate * sum(one.mean_seconds for one in delays) / len(delays)
    report: dict[str, Any] = {"per_second": rate, "waiting": round(waiting)}
    said = " or ".join(
        " to ".join(duration(end, exact=True) for end in dict.fromkeys(ends)) for ends in ranges
    )
    lines = [f"{rate:,g} message(s) a second that wait {said}"]
    if topology is None:
        return report, [*lines, f"{waiting:,.0f} wait"]
    queues = queue_loads(topology, rate, delays)
    hops = sum(one.per_second for one in queues) / rate
    memory_bytes = round(waiting * MEMORY_BYTES)
    report |= {
        "hops_per_message": hops,
        "memory_bytes": memory_bytes,
        "queues": [asdict(one) | {"waiting": round(one.waiting)} for one in queues],
    }
    rows = [
        (
            one.queue,
            duration(one.ttl_seconds, exact=True),
            round(one.per_second, 1),
            each["waiting"],
        )
        for one, each in zip(queues, report["queues"], strict=True)
    ]
    lines += [
        f"{hops:.2f} hops each; {waiting:,.0f} wait, in {_bytes(memory_bytes)} of memory",
        table(("level queue", "waits", "a second", "waiting"), rows),
        f"compare: {CEILINGS}",
    ]
    return report, lines


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


def _bytes(number: float) -> str:
    exponent = min((len(f"{number:.0f}") - 1) // 3, 4)
    return f"{number / 1000**exponent:,.1f} {('B', 'kB', 'MB', 'GB', 'TB')[exponent]}"
