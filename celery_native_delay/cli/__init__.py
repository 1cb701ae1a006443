"""``celery -A proj delay …``"""

from . import (  # their commands join the group
    broker,
    exporter,
    flower,
    parked,
    plan,
    promote,
    waiting,
)
from .group import delay

__all__ = ("broker", "delay", "exporter", "flower", "parked", "plan", "promote", "waiting")
