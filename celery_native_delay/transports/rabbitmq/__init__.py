"""RabbitMQ: messages wait in delay levels, queues with a TTL dead-lettered to one another."""

from .transport import SSLTransport, Transport

__all__ = ("SSLTransport", "Transport")
