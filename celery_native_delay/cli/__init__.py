"""``celery -A proj delay …``"""

from . import broker, exporter, parked, plan, promote, waiting  # their commands join the group
from .group import delay

__all__ = ("broker", "delay", "exporter", "parked", "plan", "promote", "waiting")
