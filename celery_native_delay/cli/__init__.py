"""``celery -A proj delay …``"""

from . import (  # noqa: F401  each registers its commands
    broker,
    export,
    exporter,
    flower,
    migrate,
    parked,
    plan,
    promote,
    rates,
    waiting,
)
from .group import delay

__all__ = ("delay",)
