"""The store: a database for delayed messages of brokers that cannot delay messages.

The attributes of this module are kombu's aliases of such brokers. For ``filesystem://``, kombu
imports the transport ``celery_native_delay.transports.sql:filesystem``.
"""

from __future__ import annotations

from typing import Any

from ..aliases import originals
from .transport import transport_of


def __getattr__(name: str) -> Any:
    if name in originals:
        return transport_of(name)
    raise AttributeError(name)
