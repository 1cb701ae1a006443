"""Start a private RabbitMQ or Redis for tests and development.

    from celery_native_delay.testing import private_rabbitmq, private_redis

    with private_rabbitmq() as rabbitmq:
        app = Celery(broker=rabbitmq.new_vhost())

    with private_redis() as redis:
        app = Celery(broker=redis.url)

RabbitMQ starts in 3 to 8 seconds, and Redis in 10 to 50 milliseconds. The brokers accept only
connections from this machine, and share nothing with other brokers. When this Python process ends,
even by SIGKILL, the brokers end, and their temporary folders are deleted.

``private_rabbitmq`` needs an installed RabbitMQ. ``private_redis`` needs an installed Redis or
Valkey, and the Python package redis-py.
"""

from .processes import BrokerFailed, BrokerMissing
from .rabbitmq import (
    PrivateRabbitMQ,
    RabbitMQInstallation,
    find_rabbitmq,
    private_rabbitmq,
    require_rabbitmq,
    vhost_name,
)
from .redis import (
    PrivateRedis,
    RedisInstallation,
    embedded_broker,
    find_redis,
    private_redis,
    require_redis,
)

__all__ = [
    "BrokerFailed",
    "BrokerMissing",
    "PrivateRabbitMQ",
    "PrivateRedis",
    "RabbitMQInstallation",
    "RedisInstallation",
    "embedded_broker",
    "find_rabbitmq",
    "find_redis",
    "private_rabbitmq",
    "private_redis",
    "require_rabbitmq",
    "require_redis",
    "vhost_name",
]
