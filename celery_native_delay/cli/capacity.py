"""``delay capacity``: the meaning of a load for the broker, before it is there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .group import (
    as_json_option,
    command,
    fitting_connection,
    installed_settings,
    print_json,
    settings,
    show,
)
from .times import Duration

if TYPE_CHECKING:
    from ..capacity.load import Load
    from ..capacity.service import Service

_file = click.Path(path_type=Path)


@command(name="capacity")
@click.option("--rate", type=float, help="Tasks that are sent a second.")
@click.option(
    "--delay",
    "delays",
    multiple=True,
    metavar="DURATION[..DURATION]",
    help="Their delay: 60, 1h30m, or any from 1m..10m. Several are equally frequent.",
)
@click.option(
    "--histogram",
    type=_file,
    help='Their delays, counted: CSV "delay,count" or "from,until,count", JSON, or a fan-out\'s.',
)
@click.option(
    "--from-ledger", is_flag=True, help="Rate and delays, as what waits now lets them be seen."
)
@click.option(
    "--step",
    type=Duration(at_least=0),
    default=0.0,
    help="Delays within a range are whole steps of so long, such as 1 for whole seconds.",
)
@click.option(
    "--tick",
    type=Duration(at_least=0),
    default=0.0,
    help="Tasks are sent together so often, as by a batch; otherwise one by one, at random.",
)
@click.option("--calibrate", is_flag=True, help="Measure the app's broker first: half a minute.")
@click.option("--service", "service_file", type=_file, help="What --calibrate --json printed once.")
@click.option(
    "--service-ms",
    type=click.FloatRange(min=0, min_open=True),
    help="Milliseconds that a message holds one of the places of a full level queue.",
)
@click.option("--cores", type=float, help="The broker's processors.")
@click.option(
    "--prefetch", type=click.IntRange(min=1), help="Its dead_letter_worker_consumer_prefetch, 32."
)
@click.option("--picture", type=click.Path(dir_okay=False), help="Draw it, too: PNG, SVG or PDF.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the simulation.")
@as_json_option
def capacity(
    ctx: click.Context,
    rate: float | None,
    delays: tuple[str, ...],
    histogram: Path | None,
    from_ledger: bool,
    step: float,
    tick: float,
    calibrate: bool,
    service_file: Path | None,
    service_ms: float | None,
    cores: float | None,
    prefetch: int | None,
    picture: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Show what a load would do to the broker: how full, how late, what gives way first.

    Needs no broker, but for --calibrate and --from-ledger. --calibrate alone prints the broker's
    speed, which --service takes. Exit status 1 if the broker would not keep up.
    """
    from ..transports.aliases import transport_of

    chosen = settings(ctx)
    ways = [bool(delays), histogram is not None, from_ledger]
    if sum(ways) > 1:
        raise click.UsageError("give one of --delay, --histogram and --from-ledger")
    load = _load(ctx, rate, delays, histogram, from_ledger, step, tick) if any(ways) else None
    if load is None and (rate is not None or not calibrate):
        raise click.UsageError(
            "say which load: --rate with --delay or --histogram, or --from-ledger; or only "
            "--calibrate"
        )
    connection = fitting_connection(ctx, chosen)
    transport = transport_of(connection.transport_cls, store=chosen.store) or ""
    if transport != "rabbitmq":
        _show_elsewhere(transport, load, calibrate, picture, as_json)
        return
    service = _service(ctx, calibrate, service_file, service_ms, cores, prefetch)
    if load is None:
        _show_service(service, as_json)
        return
    from ..capacity.report import capacity

    told = bool(calibrate or service_file or service_ms)
    report = capacity(chosen, load, service, is_measured=told, seed=seed)
    if picture:
        _draw(report, picture)
    show(report, as_json)
    ctx.exit(0 if report.keeps_up else 1)


# ---- the load --------------------------------------------------------------------------------


def _load(
    ctx: click.Context,
    rate: float | None,
    delays: tuple[str, ...],
    histogram: Path | None,
    from_ledger: bool,
    step: float,
    tick: float,
) -> Load:
    from dataclasses import replace

    from ..capacity.load import Load, load_of_file, spread_of

    if histogram is not None:
        text = _read(histogram)
        return load_of_file(text, per_second=rate, step_seconds=step, tick_seconds=tick)
    if from_ledger:
        found = _load_of_waiting(ctx, step)
        return replace(found, per_second=rate or found.per_second, tick_seconds=tick)
    if rate is None:
        raise click.UsageError("say how many tasks are sent a second: --rate")
    return Load(rate, tuple(spread_of(text, step_seconds=step) for text in delays), tick)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise click.ClickException(f"{file} cannot be read: {exc}") from exc


def _load_of_waiting(ctx: click.Context, step: float) -> Load:
    from time import time

    from ..app.delay import Delay
    from ..capacity.load import load_of_waiting

    installed_settings(ctx)
    now = time()
    bars = Delay(ctx.obj.app).histogram(bars=100)
    spans = [(bar.from_us / 1e6 - now, bar.until_us / 1e6 - now, bar.count) for bar in bars]
    return load_of_waiting(spans, step_seconds=step)


# ---- the broker ------------------------------------------------------------------------------


def _service(
    ctx: click.Context,
    calibrate: bool,
    service_file: Path | None,
    service_ms: float | None,
    cores: float | None,
    prefetch: int | None,
) -> Service:
    from ..capacity.service import BENCHMARKED, PREFETCH, Service, chosen

    told: dict[str, Any] = {"cores": cores, "prefetch": prefetch, "service_ms": service_ms}
    if calibrate and service_file:
        raise click.UsageError("give --calibrate or --service, not both")
    if calibrate:
        timings, found = _measured(ctx, cores)
        service = Service.of(timings, cores=found, prefetch=prefetch or PREFETCH)
        return chosen(service, {"service_ms": service_ms})
    service = Service.from_json(_read(service_file)) if service_file else BENCHMARKED
    return chosen(service, told)


def _measured(ctx: click.Context, cores: float | None) -> tuple[Any, float]:
    """The timings of the app's broker, and its processors."""
    import signal
    import sys

    from ..transports.timings import Calibrates
    from .group import broker

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with broker(ctx) as admin:
        assert isinstance(admin, Calibrates)
        if cores is None:
            admin.cores()  # no half a minute in vain
        click.echo("measuring for half a minute, with queues of its own", err=True)
        timings = admin.calibrate(lambda what: click.echo(f"  {what}", err=True))
        # A node tells its processors some seconds after it has started.
        return timings, admin.cores() if cores is None else cores


def _show_service(service: Service, as_json: bool) -> None:
    if as_json:
        print_json(service.as_json())
        return
    click.echo(
        f"a level queue passes {service.ceiling_per_second:,.0f} messages a second at most: "
        f"{service.prefetch} at a time, each for {service.service_ms:.3g} ms"
    )
    click.echo(
        f"a task without a delay costs {service.message_ms:.3g} ms of the broker's "
        f"{service.cores:g} processor(s), each hop {service.hop_ms:.3g} ms more, and "
        f"{service.turn_ms:.3g} ms for all that a queue hands over at once"
    )
    click.echo(
        f"all of it stood still {service.pauses_per_minute:.3g} times a minute, for "
        f"{service.pause_ms:.3g} ms"
    )
    click.echo("with --json it prints what --service takes")


# ---- showing ---------------------------------------------------------------------------------


def _show_elsewhere(
    transport: str, load: Load | None, calibrate: bool, picture: str | None, as_json: bool
) -> None:
    from ..capacity.elsewhere import Elsewhere

    if calibrate or picture or load is None:
        raise click.ClickException(
            f"expected RabbitMQ for --calibrate and --picture, got {transport}: nothing but its "
            f"level queues has a ceiling that could be measured so; leave them out to see what "
            f"waits, and what limits"
        )
    show(Elsewhere(transport, load), as_json)


def _draw(report: Any, file: str) -> None:
    try:
        from ..capacity.picture import picture

        picture(report).savefig(file)
    except (ImportError, OSError, ValueError) as exc:
        raise click.ClickException(f"{file} cannot be drawn: {exc}") from exc
