"""Redis: delayed messages wait in a sorted set. Workers move each due message to its queue."""

# Without redis-py, importing kombu's module would end in an AttributeError.
import redis  # noqa: F401

from .transport import SentinelTransport, Transport

__all__ = ("SentinelTransport", "Transport")
