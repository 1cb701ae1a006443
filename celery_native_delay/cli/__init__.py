"""The commands of ``celery -A proj delay``."""

from . import (  # noqa: F401  each registers its commands
    broker,
    holds,
    moving,
    rates,
    runs,
    schedules,
    serving,
    waiting,
)
from .group import delay

__all__ = ("delay",)
