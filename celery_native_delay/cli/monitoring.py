"""The commands ``delay exporter`` (Prometheus metrics) and ``delay flower`` (pages in Flower)."""

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
    say,
)


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
