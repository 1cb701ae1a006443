"""kombu's Redis transports, taught to let messages wait in the broker.

Without ``transport_options["native_delay"]`` they are kombu's own in every respect. What comes
back unacknowledged is pushed to its queue by kombu without passing here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kombu.transport import redis, virtual
from redis.exceptions import RedisError

from ...core.delayed import Delayed, due_of
from ...core.errors import SettingsError, UnsupportedBroker
from ...core.settings import DelaySettings
from ...kombu_hook import OPTION, asks_for_delays, settings_from_option
from .delays import Delays
from .envelope import Destination, unsealed
from .keys import Keys

if TYPE_CHECKING:
    from .admin_part import RedisAdminPart
    from .ledger import RedisLedger
    from .worker_part import RedisWorkerPart


logger = logging.getLogger(__name__)


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
        # kombu keeps the payload itself for redelivery; its trace must stay.
        self.headers, self.native_delay = unsealed(self.headers, self.properties)


class DelayingChannel:
    """What our channels do differently from kombu's; mixed in before them."""

    Message = Message

    @cached_property
    def delays(self: Any) -> Delays:
        """Delayed delivery on this channel."""
        option = (self.connection.client.transport_options or {}).get(OPTION)
        try:
            return Delays(self, settings_from_option(option))
        except SettingsError as exc:
            # Immediate messages are none of our business: only a delayed one is refused.
            return Delays(self, DelaySettings(), refusal=exc)

    def worker_part(self, settings: DelaySettings) -> RedisWorkerPart:
        """What a worker does for this broker."""
        from .worker_part import RedisWorkerPart

        return RedisWorkerPart(self, settings)

    def admin_part(self, settings: DelaySettings) -> RedisAdminPart:
        """What the command line does on this broker."""
        from .admin_part import RedisAdminPart

        return RedisAdminPart(self)

    def ledger(self, settings: DelaySettings) -> RedisLedger:
        """What waits on this broker."""
        from .ledger import RedisLedger

        return RedisLedger(self)

    # --- publishing ----------------------------------------------------------------------

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> Any:
        """Deliver to *queue*; a message whose ``eta`` header lies in the future waits first.

        Raises:
            NativeDelayError: it cannot wait there; nothing was sent.
        """
        due_us = self._due_of(message)
        if due_us is None:
            return super()._put(queue, message, **kwargs)  # type: ignore[misc]
        return self.delays.publish(
            message,
            self.destination(queue, message),
            due_us=due_us,
            batch=kwargs.get("_publish_batch"),
        )

    def _put_fanout(
        self: Any, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any
    ) -> Any:
        """Broadcast; when it is due, to whoever listens then, as without the delay."""
        due_us = self._due_of(message)
        if due_us is None:
            return super()._put_fanout(exchange, message, routing_key, **kwargs)  # type: ignore[misc]
        return self.delays.publish(
            message,
            self.broadcast(exchange, routing_key),
            due_us=due_us,
            batch=kwargs.get("_publish_batch"),
        )

    def _due_of(self, message: dict[str, Any]) -> int | None:
        """When *message* is due, if it is to wait; not what kombu redelivers through here."""
        if message.get("redelivered"):
            return None
        due_us = due_of(message.get("headers"))
        return due_us if due_us is not None and self.delays.is_ahead(due_us) else None

    def destination(self: Any, queue: str, message: dict[str, Any]) -> Destination:
        """The keys that kombu would push *message* to, and prolong, for *queue*."""
        prefix = self.delays.keys.prefix
        priority = self._get_message_priority(message, reverse=False)
        key = f"{prefix}{self._q_for_pri(queue, priority)}"
        ttl_ms = getattr(self, "_expires", {}).get(queue)  # kombu 5.7
        if not ttl_ms:
            return Destination((key,))
        every = [f"{prefix}{self._q_for_pri(queue, step)}" for step in self.priority_steps]
        return Destination((key, *(other for other in every if other != key)), ttl_ms)

    def broadcast(self: Any, exchange: str, routing_key: str) -> Destination:
        """The channels that kombu would publish on."""
        if hasattr(self, "_get_publish_topics"):
            topics = self._get_publish_topics(exchange, routing_key)
        else:  # before kombu 5.7
            topics = [self._get_publish_topic(exchange, routing_key)]
        prefix = self.delays.keys.prefix
        return Destination(tuple(f"{prefix}{topic}" for topic in topics), broadcast=True)

    # --- receiving -----------------------------------------------------------------------

    def basic_consume(
        self: Any,
        queue: str,
        no_ack: bool,
        callback: Callable[[Any], Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def noting(message: Any) -> Any:
            message.consumed_from = "" if queue in self._fanout_queues else queue
            return callback(message)

        return super().basic_consume(queue, no_ack, noting, *args, **kwargs)  # type: ignore[misc]


class Channel(DelayingChannel, redis.Channel):  # type: ignore[misc]
    """A channel whose messages with an ETA ahead wait in Redis."""


class SentinelChannel(DelayingChannel, redis.SentinelChannel):  # type: ignore[misc]
    """The same, on the master that Sentinel names."""


class Transport(redis.Transport):  # type: ignore[misc]
    """kombu's redis transport; with the ``native_delay`` option, messages wait in the broker."""

    delaying_channel = Channel

    def establish_connection(self) -> Any:
        if asks_for_delays((self.client.transport_options or {}).get(OPTION)):
            self.Channel = self.delaying_channel
        established = super().establish_connection()
        if self.Channel is self.delaying_channel:
            _say_once(self._avail_channels[-1].delays, self.client.as_uri())
        return established

    def waits_in(self, settings: DelaySettings) -> str:
        """The key under which delayed messages wait; needs no connection."""
        prefix = (self.client.transport_options or {}).get("global_keyprefix") or ""
        return Keys(prefix, settings.namespace).due


#: Servers that cannot hold delayed messages and of which this process has said so.
_said: set[str] = set()


def _say_once(delays: Delays, where: str) -> None:
    """Name a server that will refuse every delayed message, before anybody has sent one."""
    if where in _said:
        return
    _said.add(where)
    try:
        delays.prepare()
    except UnsupportedBroker as exc:
        logger.critical(
            "native delay: immediate tasks run as ever, delayed ones are refused: %s", exc
        )
    except (SettingsError, RedisError):
        return  # told to whoever delays a message, or to kombu itself


class SentinelTransport(Transport, redis.SentinelTransport):  # type: ignore[misc]
    """The same over Redis Sentinel."""

    Channel = redis.SentinelChannel
    delaying_channel = SentinelChannel
