"""The commands of ``celery -A proj delay``."""

from . import (  # noqa: F401  each registers its commands
    broker,
    holds,
    migrate,
    monitoring,
    plan,
    promote,
    rates,
    runs,
    schedules,
    uninstall,
    waiting,
)
from .group import delay

__all__ = ("delay",)
