"""Private brokers for tests: started in seconds, gone without a trace.

    from celery_native_delay.testing import private_rabbitmq

    with private_rabbitmq() as rabbitmq:
        app = Celery(broker=rabbitmq.new_vhost())

They listen on 127.0.0.1 only, never meet another broker of the same machine, and end with this
process, even if it is killed. Only the standard library is imported.
"""

from .errors import BrokerFailed, BrokerMissing
from .rabbitmq import PrivateRabbitMQ, private_rabbitmq, vhost_name
from .rabbitmq_installation import RabbitMQInstallation, find_rabbitmq, require_rabbitmq

__all__ = [
    "BrokerFailed",
    "BrokerMissing",
    "PrivateRabbitMQ",
    "RabbitMQInstallation",
    "find_rabbitmq",
    "private_rabbitmq",
    "require_rabbitmq",
    "vhost_name",
]
