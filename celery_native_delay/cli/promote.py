"""The command ``delay promote``, which delivers due tasks."""

from __future__ import annotations

import click

from .group import as_json_option, command, installed_settings, loglevel_option, reachable, say


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
