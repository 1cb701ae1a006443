"""``delay export``: all that delays need on RabbitMQ, as a file that other tools declare from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .group import as_json_option, command, fitting_connection, installed_settings, say

if TYPE_CHECKING:
    from ..settings import DelaySettings


@command(name="export")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write; standard output without it.",
)
@click.option("--vhost", help="The virtual host; without it that of the app's broker.")
@click.option(
    "--without-queues",
    is_flag=True,
    help="Leave out the app's own queues and exchanges: something else declares them first.",
)
@as_json_option
def export(
    ctx: click.Context,
    output: Path | None,
    vhost: str | None,
    without_queues: bool,
    as_json: bool,
) -> None:
    """Write all that delays need on RabbitMQ, as its own definitions. Needs no broker.

    With the app's queues, which delays are bound to. Together with native_delay_declare = False
    neither producers nor workers need the permission configure.
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
        click.echo(f"left out: {each}, which comes and goes with a process", err=True)
    if output is not None:
        _write(output, exported.text)
    counts = ", ".join(f"{number} {kind}" for kind, number in exported.counts.items())
    report = {**exported.counts, "left_out": list(exported.left_out)}
    report |= {"text": exported.text} if output is None else {"file": str(output)}
    said = exported.text.removesuffix("\n") if output is None else f"{output}: {counts}"
    say(as_json, report, said)


def _write(output: Path, text: str) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise click.ClickException(f"cannot write {output}: {exc.strerror or exc}") from exc


def _why_nothing(transport: Any, settings: DelaySettings) -> str:
    if getattr(transport, "driver_type", "") == "sqs":
        return "on SQS `celery -A PROJ delay declare` makes the delay queues, and workers do"
    where = transport.waits_in(settings)
    return f"nothing has to be declared there, tasks wait in {where}, which comes with the first"
