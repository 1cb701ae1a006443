"""Delayed messages in a database, for brokers that cannot delay messages.

kombu imports a transport class by a path. For ``filesystem://``, the path is
``celery_native_delay.transports.sql:filesystem``. This module creates the class during the import.
"""

from __future__ import annotations

from typing import Any

from ..aliases import originals
from .transport import transport_of


def __getattr__(name: str) -> Any:
    if name in originals:
        return transport_of(name)
    raise AttributeError(name)
