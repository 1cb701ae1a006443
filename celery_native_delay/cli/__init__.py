"""``celery -A proj delay …``"""

from . import broker, export, exporter, flower, parked, plan, promote, waiting
from .group import delay

__all__ = (
    "broker",
    "delay",
    "export",
    "exporter",
    "flower",
    "parked",
    "plan",
    "promote",
    "waiting",
)
