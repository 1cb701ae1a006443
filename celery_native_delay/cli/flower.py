"""``delay flower``: Flower with what waits in it."""

from __future__ import annotations

import click

from .group import command


@command(
    name="flower",
    context_settings={"ignore_unknown_options": True},
    add_help_option=False,  # Flower's own tells it
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[FLOWER OPTIONS]...")
def flower(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Start Flower with the page Delays and DELAYED tasks; all its options go with it."""
    try:
        from ..flower import run
    except ImportError as exc:
        raise click.UsageError(f"pip install 'celery_native_delay[flower]': {exc}") from exc
    run(ctx, arguments)
