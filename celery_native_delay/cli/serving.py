"""The commands that run until Ctrl-C: ``delay promote``, ``exporter`` and ``flower``."""

from __future__ import annotations

import click
from celery.bin.base import CeleryCommand

from .group import (
    Duration,
    as_json_option,
    command,
    delay,
    installed_settings,
    loglevel_option,
    reachable,
    say,
)


@command(name="promote")
@loglevel_option
@click.option(
    "-Q",
    "--queues",
    default="",
    help="On SQS: only for these queues, separated by commas; by default for all of the app.",
)
@as_json_option
def promote(ctx: click.Context, loglevel: int, queues: str, as_json: bool) -> None:
    """Deliver due tasks from Redis, SQS or a store (a database), until Ctrl-C.

    Workers with this package deliver due tasks themselves. Run this command if no worker has the
    package, or if workers stop at night. Several processes may run at once. SQS delays a message by
    at most 15 minutes: there, each waiting message is sent again every 15 minutes.
    """
    import signal

    from ..app.installation import delaying_channel
    from ..transports.interface import WorkerPart

    app = ctx.obj.app
    installed_settings(ctx)
    app.log.setup_logging_subsystem(loglevel=loglevel)
    with reachable(ctx) as connection:
        where = connection.as_uri()
        channel, settings = delaying_channel(app, connection)
        part: WorkerPart = channel.worker_part(settings)
        part.serve([name for name in queues.split(",") if name] or list(app.amqp.queues))
        prepared = part.prepare(where)
        promoter = part.promoter(app.connection_for_write)
        if promoter is None:
            raise click.UsageError(f"{where} delivers due tasks itself: nothing to promote")
    if not as_json:
        click.echo(f"promote runs: {prepared}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: promoter.stop())
    promoter.run()
    promoted, parked = promoter.promoted, promoter.parked
    text = f"{promoted} message(s) promoted, {parked} parked"
    say(as_json, {"promoted": promoted, "parked": parked}, text)


@command(name="exporter")
@click.option(
    "-p",
    "--port",
    type=click.IntRange(0, 65535),
    default=9808,
    show_default=True,
    help="The port of /metrics; 0 for any free port.",
)
@click.option(
    "-a",
    "--address",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on; 0.0.0.0 for all of this machine.",
)
@click.option(
    "-i",
    "--interval",
    type=Duration(at_least=0.1),
    default=5.0,
    show_default=True,
    help="Time between two readings of broker and store: seconds, or such as 1min.",
)
@loglevel_option
@as_json_option
def exporter(
    ctx: click.Context, port: int, address: str, interval: float, loglevel: int, as_json: bool
) -> None:
    """Serve Prometheus metrics until Ctrl-C.

    The exporter counts events, so workers must send events (-E). Run one exporter per app.
    """
    import signal
    from threading import Event

    from ..errors import ExtraMissing

    try:
        from ..metrics import expose
    except ExtraMissing as exc:
        raise click.ClickException(str(exc)) from exc
    from prometheus_client import start_http_server

    app = ctx.obj.app
    installed_settings(ctx, raises_if_unsupported=False)  # workers send events on any broker
    app.log.setup_logging_subsystem(loglevel=loglevel)
    stopping = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    exposed = expose(app, poll_seconds=interval)
    try:
        server, serving = start_http_server(port, address)
    except OSError as exc:
        exposed.close()
        raise click.ClickException(f"cannot serve on {address}:{port}: {exc}") from exc
    url = f"http://{address}:{server.server_port}/metrics"
    say(as_json, {"url": url}, f"serving {url}")
    stopping.wait()
    server.shutdown()
    serving.join()
    exposed.close()


@delay.command(
    name="flower",
    cls=CeleryCommand,
    context_settings={"ignore_unknown_options": True},
    add_help_option=False,  # Flower's own --help lists its options
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[FLOWER OPTIONS]...")
@click.pass_context
def flower(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Start Flower with the pages Delays and Rates. Takes all options of Flower."""
    from ..errors import ExtraMissing, NativeDelayError

    try:
        from ..flower import run

        run(ctx, arguments)
    except (ExtraMissing, NativeDelayError) as exc:
        raise click.ClickException(str(exc)) from exc
