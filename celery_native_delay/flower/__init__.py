"""Flower with what waits in the broker: pages *Delays* and *Rates*, REST.

For stock ``celery flower`` one line in ``flowerconfig.py``::

    from celery_native_delay.flower import install; install()

or, without one, ``celery -A proj delay flower``. Flower itself stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version

import click

from ..errors import NativeDelayError, brought_by

with brought_by("flower", whose=__name__):
    import flower.command

    from .app import DelayFlower

__all__ = ("UnsupportedFlower", "install", "run")

_OLDEST, _TOO_NEW = (2, 2), (3,)


class UnsupportedFlower(NativeDelayError):
    """The installed Flower is not of a release that the pages were made for."""


def install() -> None:
    """Add what waits to the Flower of this process; call it before it is started.

    Raises:
        UnsupportedFlower: it is older than 2.2, or 3.
    """
    found = version("flower")
    release = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if not _OLDEST <= release < _TOO_NEW:
        raise UnsupportedFlower(f"expected Flower 2.2 or a later 2.x, got {found}")
    # The name under which its command looks for it.
    flower.command.Flower = DelayFlower


def run(ctx: click.Context, arguments: Sequence[str]) -> None:
    """Run ``celery flower`` with *arguments*, as if the command of *ctx* were it."""
    install()
    command: click.Command = flower.command.flower
    with command.make_context("flower", list(arguments), parent=ctx.find_root()) as its_own:
        command.invoke(its_own)
