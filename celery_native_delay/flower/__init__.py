"""Adds the pages *Delays*, *Rates*, *Schedules* and *Runs* and a REST API to Flower.

Start Flower with ``celery -A proj delay flower``. Or add this line to the ``flowerconfig.py`` of
``celery flower``::

    from celery_native_delay.flower import install; install()
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from ..errors import brought_by

with brought_by("flower", module=__name__):
    import flower.command

    from .app import DelayFlower

__all__ = ("install", "run")


def install() -> None:
    """Add this package's pages to Flower. Call this function before Flower starts."""
    # Flower's command finds the application class under this name.
    flower.command.Flower = DelayFlower


def run(ctx: click.Context, arguments: Sequence[str]) -> None:
    """Run ``celery flower`` with this package's pages."""
    install()
    command: click.Command = flower.command.flower
    with command.make_context("flower", list(arguments), parent=ctx.find_root()) as its_own:
        command.invoke(its_own)
