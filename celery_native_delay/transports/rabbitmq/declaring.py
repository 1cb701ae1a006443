"""Declare or find queues, exchanges and bindings on RabbitMQ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import (
    AccessRefused,
    ChannelError,
    NotFound,
    PreconditionFailed,
)

from ...errors import CannotDelay, NotDeclared, NotPermitted, TopologyMismatch, UnsupportedBroker
from .address import NAMEABLE_BYTES, is_nameable
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
            self.check_name("")
            self._channel = OwnChannel(self.connection)
        return self._channel

    def can_name(self, name: str) -> bool:
        """Return True if a delayed message can go to the queue or exchange *name*.

        An empty *name* checks the virtual host, the user and this package's own names.
        """
        return self._can_quote(name, self.topology.landing_queue(name))

    def check_name(self, name: str) -> None:
        """Raise CannotDelay unless :meth:`can_name`."""
        self.check_quoted(name, self.topology.landing_queue(name))

    def check_quoted(self, *names: str) -> None:
        """Raise CannotDelay if RabbitMQ's error texts have no room for one of *names*."""
        if not self._can_quote(*names):
            raise CannotDelay(
                f"expected a name that RabbitMQ can quote in an error, beside the user and the "
                f"virtual host (all ASCII, or {NAMEABLE_BYTES} bytes together), got "
                f"{names[0] or names[-1]!r}, user {self.user!r} and virtual host "
                f"{self.connection.virtual_host!r}: shorten what is not ASCII"
            )

    def _can_quote(self, *names: str) -> bool:
        place = f"{self.connection.virtual_host}{self.user}"
        return all(is_nameable(name, place) for name in names)

    @property
    def user(self) -> str:
        return str(self.connection.client.userid or "guest")

    def apply(self, declarations: Iterable[Change]) -> None:
        """Declare queues, exchanges and bindings, or remove bindings, on RabbitMQ."""
        apply(self.channel, declarations)

    def look_for_exchange(self, name: str) -> None:
        """Raise NotFound if the exchange *name* is missing."""
        self.channel.exchange_declare(name, "fanout", passive=True)

    def has_exchange(self, name: str, *, if_refused: bool) -> bool:
        """Return True if the exchange exists; if RabbitMQ refuses access, return *if_refused*."""
        try:
            try:
                self.look_for_exchange(name)
            except AccessRefused:  # RabbitMQ 4.3 also needs a permission for this question
                # No queue is bound to the exchange, so the broker returns the message.
                _publish_nothing(self.channel, name)
                self.channel.take_returned()
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
            return self.channel.queue_declare(queue, passive=True)
        except NotFound:
            return None


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
        f"{missing}, and native_delay_declare is off: run `celery -A PROJ delay declare` as a "
        f"user who may declare, or set native_delay_declare = True. "
        f"`celery -A PROJ delay doctor` lists all that is missing"
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
            f"`celery -A PROJ delay doctor` lists every difference"
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
