"""Asking the broker and declaring: one loop for any plan; its refusals become our errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from kombu import Connection

from ...errors import NotDeclared, NotPermitted, TopologyMismatch, UnsupportedBroker
from .address import refusal_fits
from .channels import OwnChannel, Publication
from .topology import Binding, Change, Exchange, Queue, Topology, Unbinding

#: At-least-once dead-lettering came with 3.10. https://www.rabbitmq.com/docs/quorum-queues
OLDEST_RABBITMQ = (3, 10)


class Declarer:
    """Our channel on one connection for what the broker may refuse, which closes it."""

    def __init__(self, connection: Any, topology: Topology) -> None:
        self.connection = connection
        self.topology = topology
        self._channel: OwnChannel | None = None

    @property
    def channel(self) -> OwnChannel:
        """The channel; a new one when the broker closed it."""
        if self._channel is None or self._channel.connection is None:
            self._channel = OwnChannel(self.connection)
        return self._channel

    def apply(self, declarations: Iterable[Change]) -> None:
        """Declare and unbind all of *declarations*; a ChannelError is the refusal of one."""
        apply(self.channel, declarations)

    def refusal_fits(self, name: str) -> bool:
        """True if the broker's refusal of the queue or exchange *name* arrives as a refusal."""
        connection = self.connection
        return refusal_fits(name, connection.virtual_host, connection.client.userid or "guest")

    @contextmanager
    def channel_for(self, name: str, *, unreadable: type[ChannelError]) -> Iterator[OwnChannel]:
        """The channel on which to ask for *name*.

        If a refusal of *name* would not fit, the channel is on a connection of its own, which may
        break; then this raises *unreadable*.
        """
        if self.refusal_fits(name):
            yield self.channel
            return
        # Another connection to the same broker, without heartbeats, which no thread would send.
        client = Connection(**dict(self.connection.client._info(resolve=False), heartbeat=0))
        try:
            yield OwnChannel(client.connection)
        except (InternalError, UnicodeDecodeError) as exc:
            raise unreadable(f"RabbitMQ refused {name!r}") from exc
        finally:
            # Whatever state it is in; py-amqp raises AttributeError where it went away.
            with suppress(AMQPError, OSError, AttributeError):
                if client._connection is not None:
                    client._connection.collect()
                client.close()

    def look_for_exchange(self, name: str, *, unreadable: type[ChannelError] = NotFound) -> None:
        """Ask for an exchange; raises NotFound or AccessRefused, or *unreadable* for either."""
        with self.channel_for(name, unreadable=unreadable) as channel:
            channel.exchange_declare(name, "fanout", passive=True)

    def has_exchange(self, name: str, *, if_refused: bool) -> bool:
        """True if there is such a fanout exchange of ours, which leads nowhere.

        RabbitMQ 4.3 asks for the permission configure even for looking, but not for publishing to
        it; *if_refused* is what to believe without either.
        """
        try:
            try:
                self.look_for_exchange(name, unreadable=AccessRefused)
            except AccessRefused:
                self._publish_nowhere(name)
        except NotFound:
            return False
        except AccessRefused:
            return if_refused
        return True

    def has_queue(self, name: str, *, if_refused: bool) -> bool:
        """True if there is such a queue; *if_refused* as for exchanges."""
        try:
            return self.depth(name) is not None
        except AccessRefused:
            return if_refused

    def depth(self, queue: str) -> int | None:
        """Number of messages in *queue*, None if it is not declared."""
        try:
            with self.channel_for(queue, unreadable=NotFound) as channel:
                return int(channel.queue_declare(queue, passive=True).message_count)
        except NotFound:
            return None

    def _publish_nowhere(self, exchange: str) -> None:
        """Publish to an exchange to which nothing is bound, which returns the message.

        Raises:
            amqp.exceptions.NotFound: there is no such exchange.
            amqp.exceptions.AccessRefused: this user may not write to it.
        """
        with self.channel_for(exchange, unreadable=NotFound) as channel:
            channel.send(Publication(amqp.Message(), exchange, ""))
            channel.basic_qos(0, 0, False)
            channel.take_returned()


def apply(
    channel: Any, declarations: Iterable[Change], *, auto_delete_exchanges: bool = False
) -> None:
    """Declare everything without waiting for each reply, then wait once.

    Raises:
        amqp.exceptions.ChannelError: the broker refused one of them.
    """
    for declaration in declarations:
        _declare(channel, declaration, auto_delete_exchanges=auto_delete_exchanges)
    # Any synchronous method will do: by its reply all before it has been carried out.
    channel.basic_qos(0, 0, False)


def _declare(channel: Any, declaration: Change, *, auto_delete_exchanges: bool) -> None:
    lasting = {"durable": True, "auto_delete": False, "nowait": True}
    match declaration:
        case Exchange(name, kind, arguments):
            lasting["auto_delete"] = auto_delete_exchanges
            channel.exchange_declare(name, kind, arguments=arguments, **lasting)
        case Queue(name, arguments):
            channel.queue_declare(name, exclusive=False, arguments=arguments, **lasting)
        case Binding(source, destination, routing_key, to_exchange, arguments):
            bind = channel.exchange_bind if to_exchange else channel.queue_bind
            bind(destination, source, routing_key, nowait=True, arguments=arguments)
        case Unbinding(source, destination, routing_key):
            # AMQP knows no nowait here; the reply goes by unread. RabbitMQ accepts it for queues
            # and bindings that are not there.
            method: tuple[Any, ...] = (0, destination, source, routing_key, {})
            channel.send_method(spec.Queue.Unbind, "BsssF", method)


def not_permitted(refused: AccessRefused, topology: Topology) -> NotPermitted:
    """Our error for the broker's 403, with the way out."""
    return NotPermitted(
        f"{refused.reply_text}. Delayed delivery needs the permissions configure, write and read "
        f"on ^{topology.settings.namespace}\\.; grant them (rabbitmqctl set_permissions), or let a "
        f"user who has them run `celery -A PROJ delay declare` and keep write and read"
    )


def not_declared(missing: str) -> NotDeclared:
    """Our error where declaring is forbidden, with both ways out; *missing* says what is."""
    return NotDeclared(
        f"{missing}, and native_delay_declare is off: import what `celery -A PROJ delay export` "
        f"writes (rabbitmqctl import_definitions), or set native_delay_declare = True. "
        f"`celery -A PROJ delay verify` lists all that is missing"
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
    """Turn the broker's 403 and 406 to a declaration into our errors."""
    try:
        with permissions_explained(topology):
            yield
    except PreconditionFailed as exc:
        raise TopologyMismatch(
            f"{exc.reply_text}. Delete it, or choose another native_delay_namespace: "
            f"`celery -A PROJ delay verify` lists every difference"
        ) from exc


def broker_version(connection: Any) -> tuple[int, ...]:
    """Version of the broker from the connection's handshake, such as ``(4, 3, 6)``."""
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
