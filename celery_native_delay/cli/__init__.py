"""``celery -A proj delay …``"""

from . import broker, parked, plan, promote, waiting  # their commands join the group
from .group import delay

__all__ = ("broker", "delay", "parked", "plan", "promote", "waiting")
