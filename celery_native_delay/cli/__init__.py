"""``celery -A proj delay …``"""

from . import broker, capacity, exporter, flower, parked, plan, promote, waiting
from .group import delay

__all__ = (
    "broker",
    "capacity",
    "delay",
    "exporter",
    "flower",
    "parked",
    "plan",
    "promote",
    "waiting",
)
