"""``celery -A proj delay …``"""

from . import broker, flower, parked, plan, promote, waiting  # their commands join the group
from .group import delay

__all__ = ("broker", "delay", "flower", "parked", "plan", "promote", "waiting")
