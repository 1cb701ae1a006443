"""Declare or find queues, exchanges and bindings on RabbitMQ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import (
    AccessRefused,
    AMQPError,
    ChannelError,
    InternalError,
    NotFound,
    PreconditionFailed,
)

from ...errors import NotDeclared, NotPermitted, TopologyMismatch, UnsupportedBroker
from ..interface import copy_of
from .address import refusal_fits
from .channels import OwnChannel, Publication
from .topology import Binding, Change, Exchange, Queue, Topology, Unbinding

#: At-least-once dead-lettering came with RabbitMQ 3.10. https://www.rabbitmq.com/docs/quorum-queues
OLDEST_RABBITMQ = (3, 10)


#: An argument for which RabbitMQ refuses every declaration of an exchange.
WRONG_ARGUMENT = {"alternate-exchange": 0}


def _publish_nothing(channel: OwnChannel, exchange: str) -> None:
    channel.send(Publication(amqp.Message(), exchange, ""))
    channel.basic_qos(0, 0, False)


#: For each right, a call that needs it, and that changes nothing.
_RIGHTS: dict[str, Callable[[OwnChannel, str], object]] = {
    "configure": lambda channel, name: channel.exchange_declare(
        name, "fanout", arguments=WRONG_ARGUMENT
    ),
    "write": _publish_nothing,
    "read": lambda channel, name: channel.basic_get(name),
}


class Declarer:
    """Declares or finds queues and exchanges without using the user's AMQP channel."""

    def __init__(self, connection: Any, topology: Topology) -> None:
        self.connection = connection
        self.topology = topology
        self._channel: OwnChannel | None = None

    @property
    def channel(self) -> OwnChannel:
        if self._channel is None or self._channel.connection is None:
            self._channel = OwnChannel(self.connection)
        return self._channel

    def apply(self, declarations: Iterable[Change]) -> None:
        """Declare queues, exchanges and bindings, or remove bindings, on RabbitMQ."""
        apply(self.channel, declarations)

    def refusal_fits(self, name: str) -> bool:
        connection = self.connection
        return refusal_fits(name, connection.virtual_host, connection.client.userid or "guest")

    @contextmanager
    def channel_for(self, name: str, *, unreadable: type[ChannelError]) -> Iterator[OwnChannel]:
        """Yield a channel for checking that the queue or exchange *name* exists.

        If a long *name* makes RabbitMQ's error text unreadable, raise *unreadable*.
        """
        if self.refusal_fits(name):
            yield self.channel
            return
        # RabbitMQ may close a connection if the name is too long for the error text.
        client = copy_of(self.connection.client)
        try:
            yield OwnChannel(client.connection)
        except (InternalError, UnicodeDecodeError) as exc:
            raise unreadable(f"RabbitMQ refused {name!r}") from exc
        finally:
            # py-amqp raises AttributeError if the connection was lost.
            with suppress(AMQPError, OSError, AttributeError):
                if client._connection is not None:
                    client._connection.collect()
                client.close()

    def look_for_exchange(self, name: str, *, unreadable: type[ChannelError] = NotFound) -> None:
        """Raise NotFound if the exchange *name* is missing.

        If a long *name* makes RabbitMQ's error text unreadable, raise *unreadable*.
        """
        with self.channel_for(name, unreadable=unreadable) as channel:
            channel.exchange_declare(name, "fanout", passive=True)

    def has_exchange(self, name: str, *, if_refused: bool) -> bool:
        """Return True if the exchange exists; if RabbitMQ refuses access, return *if_refused*."""
        try:
            try:
                self.look_for_exchange(name, unreadable=AccessRefused)
            except AccessRefused:  # RabbitMQ 4.3 also needs a permission for this question
                self._publish_to_marker(name)
        except NotFound:
            return False
        except AccessRefused:
            return if_refused
        return True

    def refused_rights(self) -> list[str]:
        """Return which of the rights configure, write and read the user lacks on our names."""
        # RabbitMQ checks the right before it refuses these calls: the argument is wrong, and the
        # exchange and the queue do not exist.
        name = f"{self.topology.space}.rights"
        return [right for right, call in _RIGHTS.items() if self._is_refused(call, name)]

    def _is_refused(self, call: Callable[[OwnChannel, str], object], name: str) -> bool:
        try:
            call(self.channel, name)
        except AccessRefused:
            return True
        except ChannelError:
            pass
        return False

    def has_queue(self, name: str, *, if_refused: bool) -> bool:
        """Return True if the queue exists; without the permission to ask, return *if_refused*."""
        try:
            return self.depth(name) is not None
        except AccessRefused:
            return if_refused

    def depth(self, queue: str) -> int | None:
        found = self.look_at(queue)
        return None if found is None else int(found.message_count)

    def look_at(self, queue: str) -> Any:
        """Return RabbitMQ's answer with ``message_count`` and ``consumer_count``.

        If the queue does not exist, return None.
        """
        try:
            with self.channel_for(queue, unreadable=NotFound) as channel:
                return channel.queue_declare(queue, passive=True)
        except NotFound:
            return None

    def _publish_to_marker(self, exchange: str) -> None:
        """Check that an exchange exists by publishing a test message to the exchange."""
        with self.channel_for(exchange, unreadable=NotFound) as channel:
            # No queue is bound to the exchange, so the broker returns the message.
            _publish_nothing(channel, exchange)
            channel.take_returned()


def apply(channel: Any, declarations: Iterable[Change]) -> None:
    """Send all declarations to RabbitMQ; raise ChannelError if RabbitMQ refuses a declaration."""
    lasting = {"durable": True, "auto_delete": False, "nowait": True}
    for declaration in declarations:
        match declaration:
            case Exchange(name, kind, arguments):
                channel.exchange_declare(name, kind, arguments=arguments, **lasting)
            case Queue(name, arguments):
                channel.queue_declare(name, exclusive=False, arguments=arguments, **lasting)
            case Binding(source, destination, routing_key, to_exchange, arguments):
                bind = channel.exchange_bind if to_exchange else channel.queue_bind
                bind(destination, source, routing_key, nowait=True, arguments=arguments)
            case Unbinding(source, destination, routing_key):
                # queue.unbind has no nowait, and nothing reads its reply. RabbitMQ accepts
                # queue.unbind for missing queues and bindings.
                method: tuple[Any, ...] = (0, destination, source, routing_key, {})
                channel.send_method(spec.Queue.Unbind, "BsssF", method)
    # This may be any method with a reply: the broker has carried out all earlier methods by then.
    channel.basic_qos(0, 0, False)


def not_permitted(refused: AccessRefused, topology: Topology) -> NotPermitted:
    return NotPermitted(
        f"{refused.reply_text}. Delayed delivery needs the permissions configure, write and read "
        f"on ^{topology.settings.namespace}\\.; grant them (rabbitmqctl set_permissions), or let a "
        f"user who has them run `celery -A PROJ delay declare` and keep write and read"
    )


def not_declared(missing: str) -> NotDeclared:
    """Return the error for a missing queue or exchange if ``native_delay_declare`` is off."""
    return NotDeclared(
        f"{missing}, and native_delay_declare is off: import what `celery -A PROJ delay export` "
        f"writes (rabbitmqctl import_definitions), or set native_delay_declare = True. "
        f"`celery -A PROJ delay verify` lists all that is missing"
    )


@contextmanager
def permissions_explained(topology: Topology) -> Iterator[None]:
    """In a ``with`` block, turn the broker's error 403 (access refused) into NotPermitted."""
    try:
        yield
    except AccessRefused as exc:
        raise not_permitted(exc, topology) from exc


@contextmanager
def refusals_explained(topology: Topology) -> Iterator[None]:
    """In a ``with`` block, turn the errors 403 and 406 into NotPermitted and TopologyMismatch."""
    try:
        with permissions_explained(topology):
            yield
    except PreconditionFailed as exc:
        raise TopologyMismatch(
            f"{exc.reply_text}. Delete it, or choose another native_delay_namespace: "
            f"`celery -A PROJ delay verify` lists every difference"
        ) from exc


def broker_version(connection: Any) -> tuple[int, ...]:
    """Return the broker's version, such as ``(4, 3, 6)``."""
    text = str(connection.server_properties.get("version", ""))
    return tuple(
        int(part) for part in text.split("+")[0].split("-")[0].split(".") if part.isdigit()
    )


def check_broker(connection: Any) -> None:
    """Raise UnsupportedBroker if the broker is not RabbitMQ, or is older than RabbitMQ 3.10."""
    product = connection.server_properties.get("product")
    version = broker_version(connection)
    if product != "RabbitMQ" or version < OLDEST_RABBITMQ:
        shown = ".".join(map(str, version))
        raise UnsupportedBroker(
            f"expected RabbitMQ 3.10 or newer, found {product} {shown}: "
            f"upgrade the broker, or set native_delay_enabled = False"
        )
