"""kombu's pgmq transport, whose broker can delay by itself: its messages are told for how long.

In kombu since 5.7. Delays are whole seconds there, so they are rounded up: never early.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import time_ns
from typing import Any

from kombu.transport import pgmq

from ..settings import DelaySettings
from .bulk_publisher import BulkPublisher
from .lasting import is_lasting_sql
from .outbox import Batch
from .virtual.channel import DelayingTransport, PublishingChannel
from .virtual.collecting import Collecting, PlainPut
from .virtual.learnt import publisher
from .virtual.outbox import CallingOutbox, NotTaken


class Channel(PublishingChannel, pgmq.Channel):  # type: ignore[misc]
    """A channel whose messages with an ETA ahead stay invisible until then."""

    def _pgmq_send_kwargs(self, message: dict[str, Any]) -> dict[str, Any]:
        """Arguments that kombu hands to pgmq's ``send`` and ``send_topic``."""
        due_us = self.due_of(message)
        if due_us is not None:
            wait_us = due_us - time_ns() // 1000
            seconds = max(-(-wait_us // 1_000_000), 1)
            # In a copy: what is sent again, maybe when it is due, must not be delayed by this.
            message = {**message, "properties": {**message["properties"], "DelaySeconds": seconds}}
        found: dict[str, Any] = super()._pgmq_send_kwargs(message)
        return found


class PgmqCollecting(Collecting):
    """A channel that collects messages; what pgmq itself routes goes its way one by one."""

    def put_for(self, queue: str, message: dict[str, Any]) -> PlainPut:
        return PlainPut(queue, message)

    def _put_fanout(self, *args: Any, **kwargs: Any) -> None:
        self._is_routed = True
        super(Collecting, self)._put_fanout(*args, **kwargs)  # type: ignore[misc]

    def _put_topic(self, *args: Any, **kwargs: Any) -> None:
        self._is_routed = True
        super()._put_topic(*args, **kwargs)  # type: ignore[misc]


class Outbox(CallingOutbox[PlainPut]):
    """Many messages to pgmq: a hundred in a transaction, those together that wait as long."""

    collecting = PgmqCollecting

    def __init__(self, client: Any, window: int) -> None:
        super().__init__(client, window)
        self.lost = (*self.lost, *client.recoverable_connection_errors)

    def is_lasting(self, error: BaseException) -> bool:
        return is_lasting_sql(error) or super().is_lasting(error)

    def _packed(self, puts: list[PlainPut]) -> Iterable[Batch[PlainPut]]:
        return (Batch(puts),)

    def _deliver(self, batch: Batch[PlainPut]) -> None:
        channel = self.channel
        alike: dict[tuple[str, int], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        for put in batch.puts:
            told = channel._pgmq_send_kwargs(put.message)
            way = channel._queue_name(put.queue), told.get("delay", 0)
            alike.setdefault(way, []).append((put.message, told.get("headers", {})))
        try:
            with channel.pgmq.pool.connection() as connection, connection.transaction():
                for (queue, delay_seconds), sent in alike.items():
                    messages, headers = map(list, zip(*sent, strict=True))
                    channel.pgmq.send_batch(
                        queue, messages, headers=headers, delay=delay_seconds, conn=connection
                    )
        except self.lost:
            raise
        except pgmq.psycopg.Error as error:
            raise NotTaken(str(error)) from error


class Transport(DelayingTransport, pgmq.Transport):  # type: ignore[misc]
    """kombu's pgmq transport; with the ``native_delay`` option, messages wait in the broker."""

    delaying_channel = Channel

    def waits_in(self, settings: DelaySettings) -> str:
        """The place where delayed messages wait; needs no connection."""
        return "their queue of pgmq, invisible"

    def bulk_publisher(self, *, window: int) -> BulkPublisher:
        return publisher(Outbox(self.client, window))
