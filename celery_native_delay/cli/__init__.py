"""``celery -A proj delay …``"""

from . import broker, exporter, flower, parked, plan, promote, waiting
from .group import delay

__all__ = ("broker", "delay", "exporter", "flower", "parked", "plan", "promote", "waiting")
