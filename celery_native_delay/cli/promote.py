"""``delay promote``, on SQS ``delay relay``: hand over what is due, outside the workers."""

from __future__ import annotations

import click

from .group import (
    as_json_option,
    command,
    delay,
    installed_settings,
    loglevel_option,
    print_json,
    worker_part,
)


@command(name="promote")
@loglevel_option
@click.option(
    "-Q",
    "--queues",
    default="",
    help="SQS: relay for these, separated by commas; by default for all of the app's.",
)
@as_json_option
def promote(ctx: click.Context, loglevel: str, queues: str, as_json: bool) -> None:
    """Hand over messages that are due, until Ctrl-C: promote, or relay as SQS calls for.

    Installed workers do it by themselves; run this where all workers are plain ones. Any number
    may run at once.
    """
    import signal

    from ..celery_app.outage import react
    from ..transports.contract import GivesUp, Outage, Promotes, ServesQueues

    app = ctx.obj.app
    installed_settings(ctx)
    app.log.setup_logging_subsystem(loglevel=loglevel.upper())
    chosen = [name for name in queues.split(",") if name]
    with worker_part(ctx, chosen) as (part, where):
        if chosen and not isinstance(part, ServesQueues):
            raise click.UsageError(f"{where} is not asked queue by queue: leave --queues out")
        prepared = part.prepare(where)
        if not isinstance(part, Promotes):
            raise click.UsageError(f"{where} delivers what is due by itself: nothing to promote")
        promoter = part.promoter(app.connection_for_write)
    outages: list[Outage] = []

    def give_up(outage: Outage) -> None:
        outages.append(outage)
        promoter.stop()

    if isinstance(promoter, GivesUp):
        promoter.on_outage = lambda outage: react(app, outage, lambda: give_up(outage))
    if not as_json:
        click.echo(f"{ctx.info_name} runs: {prepared}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: promoter.stop())
    promoter.run()
    if as_json:
        print_json({"promoted": promoter.promoted, "parked": promoter.parked})
    else:
        click.echo(f"{promoter.promoted} message(s) promoted, {promoter.parked} parked")
    if outages:
        raise click.ClickException(str(outages[0]))


delay.add_command(promote, name="relay")
