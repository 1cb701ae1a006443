"""Extend kombu's AMQP transport, so that messages with an ETA wait in the broker.

Without ``transport_options["native_delay"]``, this transport behaves as kombu's transport.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from kombu.transport import pyamqp

from ...errors import SettingsError
from ...message import Delayed, due_of
from ...now import time_ns
from ...per_process import in_forked_children
from ...records.publishing import publish_of, underway
from ...settings import DelaySettings
from ...store.entry import StoreEntry
from ...store.interface import Row
from ...store.opened import load
from ..aliases import OPTION, asks_for_delays, settings_from_option
from ..interface import AdminPart, WorkerPart
from ..moving import MovingPart
from ..stored_bulk import StoredMessage, template_class
from ..storing import PUBLISH_SECONDS, StoringChannel
from .channels import Publication
from .delays import RabbitDelays
from .from_store import RowPublisher, entry_of, entry_of_wait
from .mirror import is_internal
from .template import FramedPublication, RabbitTaskTemplate
from .wrapping import unwrap

#: Milliseconds until the kernel gives up on unacknowledged data. With py-amqp's 1 s, messages are
#: lost without an error when the broker pauses (memory alarm, failover).
TCP_USER_TIMEOUT_MS = 60_000


class RabbitMessage(pyamqp.Message):  # type: ignore[misc]
    """A received message, with the properties that the user published."""

    #: Destination and due time; None for a message that was not delayed.
    native_delay: Delayed | None = None
    #: The body before decompression, a text if py-amqp has decoded it.
    wire_body: bytes | str = b""

    @property
    def raw_body(self) -> bytes:
        """The body before decompression."""
        body = self.wire_body or b""
        return body.encode(self.content_encoding) if isinstance(body, str) else bytes(body)


class Channel(StoringChannel, pyamqp.Channel):  # type: ignore[misc]
    """An AMQP channel that delays messages with a future ETA."""

    Message = RabbitMessage
    entry_of_wait = staticmethod(entry_of_wait)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # py-amqp sets this on the instance when confirm_publish is on, past any override.
        self.__dict__.pop("basic_publish", None)

    @property
    def delays(self) -> RabbitDelays:
        delays: RabbitDelays = self.connection.delays
        return delays

    def own_worker_part(self, settings: DelaySettings) -> WorkerPart:
        from .parts import RabbitMQWorkerPart

        return RabbitMQWorkerPart(self, settings)

    def own_admin_part(self, settings: DelaySettings) -> AdminPart:
        from .parts import RabbitMQAdminPart

        return RabbitMQAdminPart(self, settings)

    def publisher_of(
        self, connection: Any, timeout_seconds: float = PUBLISH_SECONDS
    ) -> RowPublisher:
        return RowPublisher(connection, timeout_seconds=timeout_seconds)

    def moving_part(self, settings: DelaySettings) -> MovingPart:
        from .moving import RabbitMQMovingPart

        return RabbitMQMovingPart(self, settings)

    def basic_publish(
        self,
        msg: Any,
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        immediate: bool = False,
        timeout: float | None = None,
        confirm_timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Publish a message; a message with a future ``eta`` waits in the broker.

        Raises NativeDelayError, without publishing, if the broker cannot delay the message.
        """
        connection, headers = self.connection, msg.properties.get("application_headers")
        keyed = underway.get() and publish_of(headers)
        if keyed is not None and connection is not None:
            self.store_keyed(keyed, self._entry(msg, exchange, routing_key, due_us=0))
            return None
        due_us = due_of(headers)
        if connection is not None:
            stored_us = self.due_in_store(headers, due_us)
            if stored_us is not None:
                self.store_one(self._entry(msg, exchange, routing_key, due_us=stored_us))
                return None
        if due_us is not None and connection is not None and not connection.drains:
            waits = connection.delays.publish(
                Publication(msg, exchange, routing_key, mandatory=False),
                due_us=due_us,
                timeout_seconds=timeout,
                confirm_timeout_seconds=confirm_timeout,
            )
            if waits:
                return None
        confirms = connection is not None and connection.confirm_publish
        publish_now = self.basic_publish_confirm if confirms else self._basic_publish
        return publish_now(
            msg,
            exchange,
            routing_key,
            mandatory=mandatory,
            immediate=immediate,
            timeout=timeout,
            confirm_timeout=confirm_timeout,
            **kwargs,
        )

    def _entry(self, message: Any, exchange: str, routing_key: str, *, due_us: int) -> StoreEntry:
        if exchange:  # for which the dispatcher asks
            self.delays.declarer.check_quoted(exchange)
        return entry_of(message, exchange, routing_key, due_us=due_us, now_us=time_ns() // 1000)

    def prepare_message(
        self,
        body: Any,
        priority: int | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        headers: dict[str, Any] | None = None,
        properties: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make a message that knows which call of ``Producer.publish`` it is from."""
        message = super().prepare_message(
            body, priority, content_type, content_encoding, headers, properties, **kwargs
        )
        if properties is not None:
            message.publish_call = properties
        return message

    # --- the user's declarations, noted by the mirror ------------------------------------

    def exchange_declare(
        self, exchange: str, type: str, passive: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        result = super().exchange_declare(exchange, type, passive, *args, **kwargs)
        if not passive:
            self.delays.mirror.exchange_declared(exchange, type, kwargs.get("arguments"))
        return result

    def exchange_delete(self, exchange: str, *args: Any, **kwargs: Any) -> Any:
        """Delete an exchange, and this package's copies of the exchange's bindings."""
        result = super().exchange_delete(exchange, *args, **kwargs)
        self.delays.preparation.exchange_deleted(exchange)
        return result

    def exchange_bind(self, destination: str, source: str = "", *args: Any, **kwargs: Any) -> Any:
        """Bind one exchange to another, for immediate and delayed messages."""
        result = super().exchange_bind(destination, source, *args, **kwargs)
        self.delays.mirror.exchange_bound(source)
        return result

    def queue_declare(
        self, queue: str = "", passive: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Declare a queue; delayed messages will arrive in the queue at their due time."""
        result = super().queue_declare(queue, passive, *args, **kwargs)
        if not passive:
            arguments = kwargs.get("arguments") or {}
            # py-amqp deletes a queue with its last consumer unless told otherwise. Such a queue
            # with a lifetime is Celery's queue for results (rpc://).
            brief = kwargs.get("auto_delete", True) and "x-expires" in arguments
            self.delays.mirror.queue_declared(
                result.queue if result else queue,
                arguments,
                for_replies=bool(not queue or kwargs.get("exclusive") or brief),
            )
        return result

    def queue_bind(
        self, queue: str, exchange: str = "", routing_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        result = super().queue_bind(queue, exchange, routing_key, *args, **kwargs)
        self.delays.mirror.queue_bound(queue, exchange, routing_key)
        return result

    def queue_unbind(
        self, queue: str, exchange: str, routing_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Remove a queue's binding, and this package's copy of the binding."""
        result = super().queue_unbind(queue, exchange, routing_key, *args, **kwargs)
        self.delays.preparation.queue_unbound(queue, exchange, routing_key)
        return result

    def queue_delete(self, queue: str = "", *args: Any, **kwargs: Any) -> Any:
        """Delete a queue; due messages for it will be parked."""
        result = super().queue_delete(queue, *args, **kwargs)
        self.delays.mirror.queue_deleted(queue)
        return result

    # --- receiving -----------------------------------------------------------------------

    def basic_consume(self, queue: str = "", *args: Any, **kwargs: Any) -> Any:
        """Bind *queue* to the exchange for due messages, then consume from *queue*."""
        if not is_internal(queue) and not self.delays.settings.is_all_in_store:
            self.delays.preparation.prepare_to_consume(queue)
        return super().basic_consume(queue, *args, **kwargs)

    def message_to_python(self, raw_message: Any) -> Any:
        """Return the received message with the properties that the user published."""
        unwrapped = unwrap(raw_message.properties, raw_message.delivery_info)
        delayed = None
        if unwrapped is not None:
            raw_message.properties, raw_message.delivery_info, delayed = unwrapped
        message = super().message_to_python(raw_message)
        message.native_delay = delayed
        message.wire_body = raw_message.body  # a worker may delay the message again
        return message


class BulkChannel(Channel):
    """A channel that collects messages for a bulk publisher and sends nothing."""

    collected: list[FramedPublication | StoredMessage]
    returned: list[Any]

    def basic_publish(
        self,
        msg: Any,
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        *_: Any,
        **__: Any,
    ) -> None:
        publication = Publication(msg, exchange, routing_key, mandatory)
        headers = msg.properties.get("application_headers")
        due_us = due_of(headers)
        stored_us = self.due_in_store(headers, due_us)
        if stored_us is not None:
            self.check_reach(stored_us)
            entry = self._entry(msg, exchange, routing_key, due_us=stored_us)
            self.collected.append(StoredMessage(Row.of(entry), joined=self.let_join(headers)))
            return
        if due_us is not None and not self.connection.drains:
            publication = self.delays.into_levels(publication, due_us=due_us) or publication
        self.collected.append(FramedPublication(publication, (exchange, routing_key)))


class Connection(pyamqp.Connection):  # type: ignore[misc]
    """An AMQP connection whose channels can delay messages."""

    Channel = Channel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        option = kwargs.pop(OPTION)
        kwargs["socket_settings"] = _patient(kwargs.get("socket_settings"))
        super().__init__(*args, **kwargs)
        try:
            self.delays = RabbitDelays(self, settings_from_option(option))
        except SettingsError as exc:
            # Immediate messages are published as ever; each delayed message raises the error.
            self.delays = RabbitDelays(self, DelaySettings(), refusal=exc)

        #: True if new messages with an ETA do not wait in the broker.
        self.drains = self.delays.settings.drains
        _open_here.add(self)

    def leave_to_parent(self) -> None:
        """Forget the parent's socket in a forked child, so that this connection counts as lost.

        kombu then connects again. Parent and child would read each other's confirms.
        """
        transport: Any = vars(self).get("_transport")
        self._transport = None
        if transport is not None and transport.sock is not None:
            with suppress(OSError):
                transport.sock.close()  # no shutdown: the parent's connection stays open
            transport.sock, transport.connected = None, False
        self.collect()

    def bulk_channel(self) -> BulkChannel:
        channel = BulkChannel(self)
        channel.open()
        return channel


#: The connections of this process.
_open_here: WeakSet[Connection] = WeakSet()


def _leave_to_parent() -> None:
    for connection in list(_open_here):
        connection.leave_to_parent()
    _open_here.clear()


in_forked_children(_leave_to_parent)


class Transport(pyamqp.Transport):  # type: ignore[misc]
    """kombu's AMQP transport with delayed messages, if the option ``native_delay`` is set."""

    #: The transport for what needs the store alone.
    unconnected = "celery_native_delay.transports.rabbitmq.unconnected:UnconnectedTransport"

    def establish_connection(self) -> Any:
        options = getattr(self.client, "transport_options", None) or {}
        if asks_for_delays(options.get(OPTION)):
            self.Connection = Connection
            with suppress(SettingsError):  # the connection keeps it for the first publish
                load(settings_from_option(options[OPTION]))
        return super().establish_connection()

    def bulk_publisher(self, *, window: int) -> Any:
        from ..bulk_publisher import BulkPublisher
        from .outbox import RabbitOutbox

        return BulkPublisher(RabbitOutbox(self.client, window), template_class(RabbitTaskTemplate))


class SSLTransport(Transport, pyamqp.SSLTransport):  # type: ignore[misc]
    """kombu's AMQP transport over TLS with delayed messages, if ``native_delay`` is set."""


def _patient(socket_settings: dict[int, int] | None) -> dict[int, int]:
    user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
    ours = {} if user_timeout is None else {user_timeout: TCP_USER_TIMEOUT_MS}
    return ours | (socket_settings or {})
