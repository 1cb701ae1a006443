"""Delayed messages on RabbitMQ wait in queues with a TTL."""

from .transport import SSLTransport, Transport

__all__ = ("SSLTransport", "Transport")
