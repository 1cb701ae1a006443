"""Extend kombu's Redis transports, so that delayed messages wait in Redis.

Without the transport option ``native_delay``, each transport behaves exactly like kombu's.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from kombu.transport import redis

from ...rates.in_records import RecordedLines
from ...records.interface import Records
from ...records.publishing import RecordedPublish
from ...records.waiting import WaitingTasks
from ...settings import DelaySettings
from ..interface import AdminPart, WorkerPart
from ..moving import MovingPart
from ..virtual.channel import DelayingChannel, DelayingTransport
from .delays import RedisDelays
from .keys import Destination

logger = logging.getLogger(__name__)


class QoS(redis.QoS):  # type: ignore[misc]
    """kombu's QoS class, whose :meth:`restore_unacked` raises no error after an outage."""

    def restore_unacked(self, client: Any = None) -> None:
        """Requeue unacknowledged messages; after an outage, only log a warning.

        Another consumer then requeues the messages after the visibility timeout.
        """
        # After an outage, Celery may remove the connection's parameters before the channel closes.
        transport = self.channel.connection
        if transport is not None and transport.client is not None:
            super().restore_unacked(client)
            return
        logger.warning(
            "native delay: the connection is gone; %s unacknowledged message(s) come back after "
            "the visibility timeout of %s s",
            len(self._delivered),
            self.visibility_timeout,
        )
        self._delivered.clear()


class RedisDelayingChannel(DelayingChannel):
    """A mixin for kombu's Redis channels: delayed messages wait in Redis."""

    QoS = QoS
    delays_class = RedisDelays

    def own_worker_part(self, settings: DelaySettings) -> WorkerPart:
        from .parts import RedisWorkerPart

        return RedisWorkerPart(self, settings)

    def own_admin_part(self, settings: DelaySettings) -> AdminPart:
        from .parts import RedisAdminPart

        return RedisAdminPart(self)

    def moving_part(self, settings: DelaySettings) -> MovingPart:
        from .parts import RedisMovingPart

        return RedisMovingPart(self)

    def waiting_tasks(self, settings: DelaySettings) -> WaitingTasks:
        if self.store is not None:
            return super().waiting_tasks(settings)
        from .parts import RedisWaitingTasks

        return RedisWaitingTasks(self)

    def lines(self: Any, settings: DelaySettings) -> RecordedLines:
        if self.store is not None:
            return super().lines(settings)
        from ...rates.in_redis import RedisLines

        return RedisLines(self.pool, self.delays.keys, self.connection.client.as_uri())

    def let_wait(self, queue: str, message: dict[str, Any], *, due_us: int, **kwargs: Any) -> None:
        self.delays.publish(
            message,
            self.destination(queue, message),
            due_us=due_us,
            batch=kwargs.get("_publish_batch"),
        )

    def records(self, settings: DelaySettings) -> Records:
        if self.store is not None:
            return super().records(settings)
        self.delays.prepare()
        records: Records = self.delays.records
        return records

    def let_wait_keyed(self, queue: str, message: dict[str, Any], keyed: RecordedPublish) -> None:
        if self.store is not None:
            super().let_wait_keyed(queue, message, keyed)
        else:
            self.delays.publish_keyed(keyed, message, self.destination(queue, message))

    def _put_fanout(
        self: Any, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any
    ) -> Any:
        if self.put_broadcast(exchange, message, routing_key):
            return None
        due_us = self.due_of(message)
        if due_us is None:
            return super()._put_fanout(exchange, message, routing_key, **kwargs)  # type: ignore[misc]
        return self.delays.publish(
            message,
            self.broadcast(exchange, routing_key),
            due_us=due_us,
            batch=kwargs.get("_publish_batch"),
        )

    def destination(self: Any, queue: str, message: dict[str, Any]) -> Destination:
        """Return the Redis list that receives a due message for *queue*."""
        prefix = self.delays.keys.prefix
        priority = self._get_message_priority(message, reverse=False)
        key = f"{prefix}{self._q_for_pri(queue, priority)}"
        ttl_ms = getattr(self, "_expires", {}).get(queue)  # kombu 5.7
        if not ttl_ms:
            return Destination((key,))
        every = [f"{prefix}{self._q_for_pri(queue, step)}" for step in self.priority_steps]
        return Destination((key, *(other for other in every if other != key)), ttl_ms)

    def queue_of(self: Any, destination: Destination, envelope: str | bytes) -> str:
        """Return the queue name of *destination*, or "" for a fanout exchange.

        *envelope* is the waiting message, as kombu's JSON.
        """
        if destination.broadcast:
            return ""
        key = destination.keys[0].removeprefix(self.delays.keys.prefix)
        if self.sep not in key:
            return key
        # The name of the queue may contain ``sep``, too.
        step = self.priority(self._get_message_priority(json.loads(envelope), reverse=False))
        return key.removesuffix(f"{self.sep}{step}") if step else key

    def broadcast(self: Any, exchange: str, routing_key: str) -> Destination:
        """Return the Redis pub/sub channels of a fanout exchange."""
        if hasattr(self, "_get_publish_topics"):
            topics = self._get_publish_topics(exchange, routing_key)
        else:  # before kombu 5.7
            topics = [self._get_publish_topic(exchange, routing_key)]
        prefix = self.delays.keys.prefix
        return Destination(tuple(f"{prefix}{topic}" for topic in topics), broadcast=True)


class Channel(RedisDelayingChannel, redis.Channel):  # type: ignore[misc]
    """kombu's Redis channel, which also stores delayed messages."""


class SentinelChannel(RedisDelayingChannel, redis.SentinelChannel):  # type: ignore[misc]
    """kombu's Sentinel channel, which also stores delayed messages."""


class Transport(DelayingTransport, redis.Transport):  # type: ignore[misc]
    """kombu's redis transport; with the option ``native_delay``, delayed messages wait in Redis."""

    delaying_channel = Channel

    def own_outbox(self, window: int) -> Any:
        from .outbox import RedisOutbox

        return RedisOutbox(self.client, window)


class SentinelTransport(Transport, redis.SentinelTransport):  # type: ignore[misc]
    """kombu's sentinel transport; with ``native_delay``, delayed messages wait in Redis."""

    Channel = redis.SentinelChannel
    delaying_channel = SentinelChannel
