"""``celery -A proj delay …``"""

from . import (
    broker,
    capacity,
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

__all__ = (
    "broker",
    "capacity",
    "delay",
    "export",
    "exporter",
    "flower",
    "migrate",
    "parked",
    "plan",
    "promote",
    "rates",
    "waiting",
)
