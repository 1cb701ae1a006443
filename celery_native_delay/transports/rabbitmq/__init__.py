"""Delay messages on RabbitMQ: a message waits in several queues with a TTL, one after another."""

from .transport import SSLTransport, Transport

__all__ = ("SSLTransport", "Transport")
