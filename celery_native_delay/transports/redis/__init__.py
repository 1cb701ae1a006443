"""Redis: messages wait in a sorted set, and every worker promotes what is due."""

# Without redis-py kombu's module would end in an AttributeError.
import redis  # noqa: F401

from .transport import SentinelTransport, Transport

__all__ = ("SentinelTransport", "Transport")
