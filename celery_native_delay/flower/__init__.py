"""Flower with what waits in the broker: pages *Delays* and *Rates*, REST.

For stock ``celery flower`` one line in ``flowerconfig.py``::

    from celery_native_delay.flower import install; install()

or, without one, ``celery -A proj delay flower``. Flower itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from ..errors import brought_by

with brought_by("flower", whose=__name__):
    import flower.command

    from .app import DelayFlower

__all__ = ("install", "run")


def install() -> None:
    """Add what waits to the Flower of this process; call it before it is started."""
    # The name under which its command looks for it.
    flower.command.Flower = DelayFlower


def run(ctx: click.Context, arguments: Sequence[str]) -> None:
    """Run ``celery flower`` with *arguments*, as if the command of *ctx* were it."""
    install()
    command: click.Command = flower.command.flower
    with command.make_context("flower", list(arguments), parent=ctx.find_root()) as its_own:
        command.invoke(its_own)
