"""The commands ``delay promote`` and ``delay relay``, which deliver due tasks."""

from __future__ import annotations

import click

from .group import as_json_option, command, installed_settings, loglevel_option, reachable, say


@command(name="promote")
@loglevel_option
@as_json_option
def promote(ctx: click.Context, loglevel: int, as_json: bool) -> None:
    """Deliver due tasks from Redis or from a store (a database), until Ctrl-C.

    Workers with this package deliver due tasks themselves. Run this command if no worker has the
    package, or if workers stop at night. Several processes may run at once. On SQS use `relay`.
    """
    _run(ctx, loglevel, "", as_json, done="promoted")


@command(name="relay")
@loglevel_option
@click.option(
    "-Q",
    "--queues",
    default="",
    help="Relay for these queues, separated by commas; by default for all of the app.",
)
@as_json_option
def relay(ctx: click.Context, loglevel: int, queues: str, as_json: bool) -> None:
    """Resend waiting SQS tasks every 15 minutes, until Ctrl-C.

    SQS delays a message by at most 15 minutes, so a longer delay needs several waits. After each
    wait, this command sends the message to a queue for the next wait. Workers with this package do
    the same. Run this command if no worker has the package. Several processes may run at once.
    """
    _run(ctx, loglevel, queues, as_json, done="relayed")


def _run(ctx: click.Context, loglevel: int, queues: str, as_json: bool, *, done: str) -> None:
    import signal

    from ..app.installation import delaying_channel
    from ..transports.interface import WorkerPart

    app = ctx.obj.app
    installed_settings(ctx)
    app.log.setup_logging_subsystem(loglevel=loglevel)
    chosen = [name for name in queues.split(",") if name]
    with reachable(ctx) as connection:
        where = connection.as_uri()
        channel, settings = delaying_channel(app, connection)
        if chosen and connection.transport.driver_type != "sqs":
            raise click.UsageError(f"{where} needs no relay per queue: leave --queues out")
        part: WorkerPart = channel.worker_part(settings)
        part.serve(chosen or list(app.amqp.queues))
        prepared = part.prepare(where)
        promoter = part.promoter(app.connection_for_write)
        if promoter is None:
            raise click.UsageError(f"{where} delivers due tasks itself: nothing to promote")
    if not as_json:
        click.echo(f"{ctx.info_name} runs: {prepared}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: promoter.stop())
    promoter.run()
    text = f"{promoter.promoted} message(s) {done}, {promoter.parked} parked"
    say(as_json, {done: promoter.promoted, "parked": promoter.parked}, text)
