"""``delay flower``: Flower with what waits in it."""

from __future__ import annotations

import click
from celery.bin.base import CeleryCommand

from .group import delay


@delay.command(
    name="flower",
    cls=CeleryCommand,
    context_settings={"ignore_unknown_options": True},
    add_help_option=False,  # Flower's own tells it
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[FLOWER OPTIONS]...")
@click.pass_context
def flower(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Start Flower with the page Delays; all its options go with it."""
    from ..errors import ExtraMissing, NativeDelayError

    try:
        from ..flower import run

        run(ctx, arguments)
    except (ExtraMissing, NativeDelayError) as exc:
        raise click.ClickException(str(exc)) from exc
