"""Mixins that let kombu's virtual transports delay messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar

from amqp.exceptions import RecoverableConnectionError
from kombu.transport import virtual

from ...due_time import check_due
from ...errors import CannotDelay, NativeDelayError, SettingsError
from ...message import Delayed, due_of
from ...now import time_ns
from ...records.publishing import RecordedPublish, publish_of, underway
from ...settings import DelaySettings
from ...store.entry import StoreEntry
from ...store.interface import Store
from ...store.opened import load, store_of
from ..aliases import OPTION, asks_for_delays, settings_from_option
from ..bulk_publisher import BulkPublisher
from ..storing import PUBLISH_SECONDS, StoringChannel
from .from_store import ChannelPublisher, collected, entry_of, entry_of_wait
from .wrapping import due_then, unwrapped


class VirtualDelays:
    """Publishes delayed messages on one channel; each broker has a subclass."""

    refusal: NativeDelayError | None = None
    """The error that every delayed publish raises, or None if delays work."""

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        self.settings = settings
        self._channel = channel

    @cached_property
    def store(self) -> Store | None:
        """Return the store in ``native_delay_store``; None if not set."""
        self.check_settings()
        return None if self.settings.store is None else store_of(self.settings, self.place)

    @property
    def place(self) -> str:
        """The database or prefix, which tells this broker from others of the same namespace."""
        return str(self._channel.connection.client.virtual_host or "")

    def check_settings(self) -> None:
        """If this channel cannot delay messages, raise the error stored in :attr:`refusal`."""
        if self.refusal is not None:
            raise self.refusal

    def check_reach(self, due_us: int) -> None:
        """Raise DelayTooLong if the delay is longer than the settings allow."""
        check_due(
            due_us,
            now_us=time_ns() // 1000,
            longest_delay_seconds=self.settings.longest_delay_seconds,
        )


class VirtualMessage(virtual.Message):  # type: ignore[misc]
    """A received message, whose header ``native_delay`` is parsed and then removed."""

    headers: dict[str, Any]
    native_delay: Delayed | None = None
    consumed_from: str = ""  # a queue, or "" for a fanout message

    def __init__(self, payload: Any, channel: Any = None, **kwargs: Any) -> None:
        super().__init__(payload, channel=channel, **kwargs)
        # kombu keeps the payload for redelivery, and our header stays in the payload.
        self.headers, self.native_delay = unwrapped(self.headers, self.properties)


class DelayingChannel(StoringChannel):
    """A mixin that lets channels of kombu's virtual transports delay messages."""

    Message = VirtualMessage
    entry_of_wait = staticmethod(entry_of_wait)

    delays_class: ClassVar[Callable[..., Any]]
    """The class that publishes delayed messages to this broker."""

    disconnected: ClassVar[type[Exception]] = RecoverableConnectionError
    """The recoverable error that a delayed publish on a closed channel raises."""

    def let_wait(self, queue: str, message: dict[str, Any], *, due_us: int, **kwargs: Any) -> Any:
        """Publish a delayed message for *queue*."""
        raise NotImplementedError

    def let_wait_keyed(self, queue: str, message: dict[str, Any], keyed: RecordedPublish) -> Any:
        """Publish a message that has a debounce, throttle or unique key."""
        self.store_keyed(keyed, entry_of(message, queue, due_us=0))

    def moving_part(self, settings: DelaySettings) -> Any:
        from .moving import VirtualMovingPart

        return VirtualMovingPart(self)

    def publisher_of(
        self, connection: Any, timeout_seconds: float = PUBLISH_SECONDS
    ) -> ChannelPublisher:
        return ChannelPublisher(connection)

    def put_due(self: Any, message: dict[str, Any], entry: StoreEntry) -> None:
        """Publish the message of a due row, which no clock delays again."""
        if entry.queue is None:
            super()._put_fanout(entry.exchange, message, entry.routing_key)  # type: ignore[misc]
        else:
            super()._put(entry.queue, message)  # type: ignore[misc]

    def put_broadcast(self: Any, exchange: str, message: dict[str, Any], routing_key: str) -> bool:
        """Store a delayed message for a fanout exchange. Returns False if it does not wait there.

        Raises CannotDelay if the message has a debounce, throttle or unique key.
        """
        if publish_of(message.get("headers")) is not None:
            raise CannotDelay(
                f"expected a task with a key to go to a queue, got the exchange {exchange!r}, "
                f"which broadcasts: name its queue"
            )
        stored_us = self.stored_us(message, self.due_of(message))
        if stored_us is None:
            return False
        self.store_one(entry_of(message, None, due_us=stored_us))
        return True

    @property
    def delays(self: Any) -> Any:
        """The publisher of delayed messages on this channel; raises if the channel is closed."""
        if self.connection is None:
            raise self.disconnected("the connection of this channel was closed")
        return self._delays

    @cached_property
    def _delays(self: Any) -> Any:
        option = (self.connection.client.transport_options or {}).get(OPTION)
        try:
            return self.delays_class(self, settings_from_option(option))
        except SettingsError as exc:
            # Immediate messages are published as ever; each delayed message raises the error.
            delays = self.delays_class(self, DelaySettings())
            delays.refusal = exc
            return delays

    def basic_publish(
        self: Any, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any
    ) -> Any:
        if self.connection is None:
            self.due_of(message)  # raises for a delayed message
        return super().basic_publish(message, exchange, routing_key, **kwargs)  # type: ignore[misc]

    def due_of(self, message: dict[str, Any]) -> int | None:
        """Return the due time (µs since the epoch), or None if the message needs no delay."""
        if message.get("redelivered"):
            return None
        due_us = due_of(message.get("headers"))
        if due_us is None or due_us <= time_ns() // 1000 or self.delays.settings.drains:
            return None
        return due_us

    def stored_us(self, message: dict[str, Any], due_us: int | None) -> int | None:
        """Return when the store publishes a message, in µs; None if it goes to the broker.

        *due_us* is the result of :meth:`due_of`, which takes a while.
        """
        if message.get("redelivered"):
            return None
        return self.due_in_store(message.get("headers"), due_us)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> Any:
        keyed = underway.get() and publish_of(message.get("headers"))
        if keyed is not None:
            return self._put_keyed(queue, message, keyed, **kwargs)
        due_us = self.due_of(message)
        stored_us = self.stored_us(message, due_us)
        if stored_us is not None:
            return self.store_one(entry_of(message, queue, due_us=stored_us))
        if due_us is None:
            return super()._put(queue, message, **kwargs)  # type: ignore[misc]
        return self.let_wait(queue, message, due_us=due_us, **kwargs)

    def _put_keyed(
        self, queue: str, message: dict[str, Any], keyed: RecordedPublish, **kwargs: Any
    ) -> Any:
        due_us = keyed.due_us
        if due_us is None:
            return self.let_wait_keyed(queue, message, keyed)
        # The first queue's copy has replaced the waiting message; this copy is for another queue.
        message = collected(keyed, due_then(message, due_us))
        if self.waits_in_store(message.get("headers")):
            return self.store_one(entry_of(message, queue, due_us=due_us))
        return self.let_wait(queue, message, due_us=due_us, **kwargs)

    def basic_consume(
        self: Any,
        queue: str,
        no_ack: bool,
        callback: Callable[[Any], Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def noting(message: Any) -> Any:
            # Some of kombu's transports have queues for broadcasts.
            broadcast = queue in getattr(self, "_fanout_queues", ())
            message.consumed_from = "" if broadcast else queue
            return callback(message)

        return super().basic_consume(queue, no_ack, noting, *args, **kwargs)  # type: ignore[misc]


class DelayingTransport:
    """A mixin for kombu transports: the transport option ``native_delay`` turns on delays."""

    delaying_channel: ClassVar[type]

    @property
    def delaying(self: Any) -> bool:
        return asks_for_delays((self.client.transport_options or {}).get(OPTION))

    def establish_connection(self: Any) -> Any:
        if self.delaying:
            self.Channel = self.delaying_channel
            with suppress(SettingsError):  # the channel keeps it for the first publish
                load(settings_from_option((self.client.transport_options or {}).get(OPTION)))
        return super().establish_connection()  # type: ignore[misc]

    @property
    def has_store(self: Any) -> bool:
        """True if ``native_delay_store`` is set."""
        option = (self.client.transport_options or {}).get(OPTION)
        return settings_from_option(option).store is not None

    def own_outbox(self, window: int) -> Any:
        """Return what ``bulk(app)`` sends with if tasks wait in this broker."""
        raise NotImplementedError

    def bulk_publisher(self: Any, *, window: int) -> BulkPublisher:
        from ..stored_bulk import template_class
        from .outbox import StoreOutbox
        from .template import VirtualTaskTemplate

        outbox = StoreOutbox(self.client, window) if self.has_store else self.own_outbox(window)
        return BulkPublisher(outbox, template_class(VirtualTaskTemplate))
