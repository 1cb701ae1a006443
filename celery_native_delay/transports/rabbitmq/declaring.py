"""One loop applies any plan; the broker's refusals become our errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from amqp import spec
from amqp.exceptions import AccessRefused, PreconditionFailed

from ...errors import NotPermitted, TopologyMismatch, UnsupportedBroker
from .topology import Binding, Change, Exchange, Queue, Topology, Unbinding

#: At-least-once dead-lettering came with 3.10. https://www.rabbitmq.com/docs/quorum-queues
OLDEST_RABBITMQ = (3, 10)


def apply(channel: Any, declarations: Iterable[Change]) -> None:
    """Declare everything without waiting for each reply, then wait once.

    Raises:
        amqp.exceptions.ChannelError: the broker refused one of them.
    """
    for declaration in declarations:
        _declare(channel, declaration)
    # Any synchronous method will do: by its reply all before it has been carried out.
    channel.basic_qos(0, 0, False)


def _declare(channel: Any, declaration: Change) -> None:
    durable = {"durable": True, "auto_delete": False, "nowait": True}
    match declaration:
        case Exchange(name, kind, arguments):
            channel.exchange_declare(name, kind, arguments=arguments, **durable)
        case Queue(name, arguments):
            channel.queue_declare(name, exclusive=False, arguments=arguments, **durable)
        case Binding(source, destination, routing_key, to_exchange=True):
            channel.exchange_bind(destination, source, routing_key, nowait=True)
        case Binding(source, destination, routing_key):
            channel.queue_bind(destination, source, routing_key, nowait=True)
        case Unbinding(source, destination, routing_key):
            # AMQP knows no nowait here; the reply goes by unread. RabbitMQ accepts it for queues
            # and bindings that are not there.
            method: tuple[Any, ...] = (0, destination, source, routing_key, {})
            channel.send_method(spec.Queue.Unbind, "BsssF", method)


def not_permitted(refused: AccessRefused, topology: Topology) -> NotPermitted:
    """The broker's 403 as our error, with the way out."""
    return NotPermitted(
        f"{refused.reply_text}. Delayed delivery needs the permissions configure, write and read "
        f"on ^{topology.settings.namespace}\\.; grant them (rabbitmqctl set_permissions), or let a "
        f"user who has them run `celery -A PROJ delay declare` and keep write and read"
    )


@contextmanager
def permissions_explained(topology: Topology) -> Iterator[None]:
    """Turn the broker's 403 into our error."""
    try:
        yield
    except AccessRefused as exc:
        raise not_permitted(exc, topology) from exc


@contextmanager
def refusals_explained(topology: Topology) -> Iterator[None]:
    """The same for a declaration, which the broker also refuses with 406."""
    try:
        with permissions_explained(topology):
            yield
    except PreconditionFailed as exc:
        raise TopologyMismatch(
            f"{exc.reply_text}. Delete it, or choose another native_delay_namespace: "
            f"`celery -A PROJ delay verify` lists every difference"
        ) from exc


def broker_version(connection: Any) -> tuple[int, ...]:
    """The broker's version from the connection's handshake, such as ``(4, 3, 6)``."""
    text = str(connection.server_properties.get("version", ""))
    return tuple(
        int(part) for part in text.split("+")[0].split("-")[0].split(".") if part.isdigit()
    )


def check_broker(connection: Any) -> None:
    """Refuse a broker that cannot hold the delay levels.

    Raises:
        UnsupportedBroker: not RabbitMQ, or older than 3.10.
    """
    product = connection.server_properties.get("product")
    version = broker_version(connection)
    if product != "RabbitMQ" or version < OLDEST_RABBITMQ:
        shown = ".".join(map(str, version))
        raise UnsupportedBroker(
            f"expected RabbitMQ 3.10 or newer, found {product} {shown}: "
            f"upgrade the broker, or set native_delay_enabled = False"
        )
