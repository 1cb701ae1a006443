"""RabbitMQ: delayed messages wait in delay levels (queues with a TTL), one level after another."""

from .transport import SSLTransport, Transport

__all__ = ("SSLTransport", "Transport")
