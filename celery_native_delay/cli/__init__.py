"""``celery -A proj delay …``"""

from . import broker, exporter, flower, migrate, parked, plan, promote, waiting
from .group import delay

__all__ = (
    "broker",
    "delay",
    "exporter",
    "flower",
    "migrate",
    "parked",
    "plan",
    "promote",
    "waiting",
)
