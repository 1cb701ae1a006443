"""A channel and a transport of kombu's virtual ones, taught to let messages wait.

Mixed in before kombu's own. Each broker has its own :meth:`~DelayingChannel.let_wait`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from time import time_ns
from typing import Any, ClassVar

from amqp.exceptions import RecoverableConnectionError
from kombu.transport import virtual

from ...errors import CannotDelay, SettingsError
from ...keyed.publishing import KeyedPublish, keyed_publish, underway
from ...message import Delayed, due_of
from ...records.interface import Records
from ...settings import DelaySettings
from ..aliases import OPTION, asks_for_delays, settings_from_option
from ..interface import without_records
from .wrapping import due_then, unwrapped


class Message(virtual.Message):  # type: ignore[misc]
    """A received message; one that waited looks as if it had not.

    *native_delay* tells of its wait, None if there was none; *consumed_from* is the queue it came
    from, "" for a broadcast, which no queue of this name ever held.
    """

    headers: dict[str, Any]
    native_delay: Delayed | None = None
    consumed_from: str = ""

    def __init__(self, payload: Any, channel: Any = None, **kwargs: Any) -> None:
        super().__init__(payload, channel=channel, **kwargs)
        # kombu keeps the payload itself for redelivery; our header must stay.
        self.headers, self.native_delay = unwrapped(self.headers, self.properties)


class PublishingChannel:
    """A delayed publish on a closed channel is an outage, which kombu retries, as on RabbitMQ."""

    disconnected: ClassVar[type[Exception]] = RecoverableConnectionError
    """The error on a closed channel: one from which its transport recovers."""

    def basic_publish(
        self: Any, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any
    ) -> Any:
        if self.due_of(message) is not None:
            self.check_connected()
        return super().basic_publish(message, exchange, routing_key, **kwargs)  # type: ignore[misc]

    def check_connected(self: Any) -> None:
        """Raise :attr:`disconnected` on a channel that was closed, maybe with its connection."""
        if self.connection is None:
            raise self.disconnected("the connection of this channel was closed")

    @staticmethod
    def due_of(message: dict[str, Any]) -> int | None:
        """The due time of *message*, if it is to wait; not of one that kombu redelivers."""
        if message.get("redelivered"):
            return None
        due_us = due_of(message.get("headers"))
        return due_us if due_us is not None and due_us > time_ns() // 1000 else None


class DelayingChannel(PublishingChannel):
    """A channel whose messages can wait; mixed in before kombu's."""

    Message = Message

    delays_class: ClassVar[Callable[..., Any]]
    """The broker's own :class:`~.delays.Delays`, of a channel and its settings."""

    def make_delays(self, settings: DelaySettings) -> Any:
        """Delayed delivery on this channel."""
        return type(self).delays_class(self, settings)

    def let_wait(self, queue: str, message: dict[str, Any], *, due_us: int, **kwargs: Any) -> Any:
        """Keep kombu's *message* for *queue* until it is due; *kwargs* are kombu's own.

        NativeDelayError: it cannot wait there; nothing was sent.
        """
        raise NotImplementedError

    def let_wait_keyed(self, queue: str, message: dict[str, Any], keyed: KeyedPublish) -> Any:
        """Put kombu's *message* in as its key has it; AnotherStands if that has another."""
        raise without_records(self)

    def records(self, settings: DelaySettings) -> Records:
        """The records that change with what waits; UnsupportedBroker where there are none."""
        raise without_records(self)

    @property
    def delays(self) -> Any:
        """Delayed delivery on this channel; raises :attr:`disconnected` when it was closed."""
        self.check_connected()
        return self._delays

    @cached_property
    def _delays(self: Any) -> Any:
        option = (self.connection.client.transport_options or {}).get(OPTION)
        try:
            return self.make_delays(settings_from_option(option))
        except SettingsError as exc:
            # Immediate messages are none of our business: only a delayed one is refused.
            delays = self.make_delays(DelaySettings())
            delays.refusal = exc
            return delays

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> Any:
        """Deliver to *queue*; a message whose ``eta`` header lies in the future waits first."""
        keyed = underway.get() and keyed_publish(message.get("headers"))
        if keyed is not None:
            return self._put_keyed(queue, message, keyed, **kwargs)
        due_us = self.due_of(message)
        if due_us is None:
            return super()._put(queue, message, **kwargs)  # type: ignore[misc]
        return self.let_wait(queue, message, due_us=due_us, **kwargs)

    def _put_keyed(
        self, queue: str, message: dict[str, Any], keyed: KeyedPublish, **kwargs: Any
    ) -> Any:
        """Its first copy takes the place of others; an exchange may lead to several queues."""
        due_us = keyed.due_us
        if due_us is None:
            return self.let_wait_keyed(queue, message, keyed)
        return self.let_wait(queue, due_then(message, due_us), due_us=due_us, **kwargs)

    def check_unkeyed(self, message: dict[str, Any], exchange: str) -> None:
        """Raise CannotDelay for a broadcast under a key."""
        if keyed_publish(message.get("headers")) is not None:
            raise CannotDelay(
                f"expected a task with a key to go to a queue, got the exchange {exchange!r}, "
                f"which broadcasts: name its queue"
            )

    def basic_consume(
        self: Any,
        queue: str,
        no_ack: bool,
        callback: Callable[[Any], Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def noting(message: Any) -> Any:
            # Some of kombu's hold queues for broadcasts, and some none at all.
            broadcast = queue in getattr(self, "_fanout_queues", ())
            message.consumed_from = "" if broadcast else queue
            return callback(message)

        return super().basic_consume(queue, no_ack, noting, *args, **kwargs)  # type: ignore[misc]


class DelayingTransport:
    """kombu's transport, with *delaying_channel* where a connection asks for delays."""

    delaying_channel: ClassVar[type]

    @property
    def delaying(self: Any) -> bool:
        return asks_for_delays((self.client.transport_options or {}).get(OPTION))

    def establish_connection(self: Any) -> Any:
        if self.delaying:
            self.Channel = self.delaying_channel
        return super().establish_connection()  # type: ignore[misc]
