"""The store: a database in which messages wait whose broker has no delay of its own.

What NServiceBus called its timeout manager. The names of this module are kombu's aliases of such
brokers: kombu asks for them as ``celery_native_delay.transports.sql:filesystem``.
"""

from __future__ import annotations

from typing import Any

from ..aliases import originals
from .transport import transport_of


def __getattr__(name: str) -> Any:
    if name in originals:
        return transport_of(name)
    raise AttributeError(name)
