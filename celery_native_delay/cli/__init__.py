"""``celery -A proj delay …``"""

from . import broker, parked, plan, promote  # their commands join the group
from .group import delay

__all__ = ("broker", "delay", "parked", "plan", "promote")
