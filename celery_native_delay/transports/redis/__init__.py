"""Redis: messages wait in a sorted set, and every worker promotes what is due."""

from .transport import SentinelTransport, Transport

__all__ = ("SentinelTransport", "Transport")
