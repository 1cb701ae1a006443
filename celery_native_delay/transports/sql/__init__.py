"""Delayed messages in a database, for brokers that cannot delay messages.

This module has one attribute for each kombu transport. For ``filesystem://``, kombu imports
``celery_native_delay.transports.sql:filesystem``.
"""

from __future__ import annotations

from typing import Any

from ..aliases import originals
from .transport import transport_of


def __getattr__(name: str) -> Any:
    if name in originals:
        return transport_of(name)
    raise AttributeError(name)
