"""The command ``delay export``: print RabbitMQ definitions of queues and exchanges for delays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .group import as_json_option, command, fitting_connection, installed_settings, say

if TYPE_CHECKING:
    from ..settings import DelaySettings


@command(name="export")
@click.option("--vhost", help="The virtual host; by default that of the app's broker.")
@click.option(
    "--without-queues",
    is_flag=True,
    help="Leave out the app's own queues and exchanges: another tool must declare them first.",
)
@as_json_option
def export(ctx: click.Context, vhost: str | None, without_queues: bool, as_json: bool) -> None:
    """Print RabbitMQ definitions of the queues and exchanges for delays.

    The definitions include the app's queues. The command needs no broker. Import the definitions
    with rabbitmqctl or the management API, and set native_delay_declare = False. Then producers and
    workers do not need the permission "configure".
    """
    from ..app.broker import shown_broker
    from ..errors import UnsupportedBroker

    app = ctx.obj.app
    chosen = installed_settings(ctx)
    transport = fitting_connection(ctx, chosen).transport
    if not hasattr(transport, "export"):
        raise UnsupportedBroker(
            f"expected RabbitMQ, got {shown_broker(app)}: {_why_nothing(transport, chosen)}"
        )
    queues = list(app.amqp.queues.values())
    exported = transport.export(chosen, queues, vhost=vhost, own_queues=not without_queues)
    for each in exported.left_out:
        click.echo(f"left out: {each}, which a process declares and deletes itself", err=True)
    if not as_json:
        counts = ", ".join(f"{count} {kind}" for kind, count in exported.counts.items())
        click.echo(counts, err=True)
    report = {"left_out": list(exported.left_out), "text": exported.text}
    say(as_json, {**exported.counts, **report}, exported.text.removesuffix("\n"))


def _why_nothing(transport: Any, settings: DelaySettings) -> str:
    if getattr(transport, "driver_type", "") == "sqs":
        return "on SQS workers and `celery -A PROJ delay declare` create the delay queues"
    where = transport.waits_in(settings)
    return f"tasks wait there in {where}, which the first task creates"
