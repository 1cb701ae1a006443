"""Delayed messages on Amazon SQS, which can delay a message by up to 15 minutes.

A longer delay is split into periods of up to 15 minutes. During the last period, the message is in
the destination queue. During each earlier period, the message is in the delay queue
``<queue>-delay.fifo``; when the period ends, a worker thread sends the message again.

Install ``celery_native_delay[sqs]``.

Without the transport option ``native_delay``, the transport behaves exactly like kombu's.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import SQS

from ...settings import DelaySettings
from ...store.entry import StoreEntry
from ..interface import AdminPart, WorkerPart
from ..virtual.channel import DelayingChannel, DelayingTransport
from .delays import SqsDelays, leave_to_celery
from .entry import group_of
from .queues import can_delay


class Channel(DelayingChannel, SQS.Channel):  # type: ignore[misc]
    """kombu's SQS channel, which can also delay messages."""

    delays_class = SqsDelays

    @property
    def _queue_cache(self) -> dict[str, str]:
        """Return the queue URLs of this connection; other connections have separate caches."""
        # Before kombu 5.7 all connections share one cache.
        cache: dict[str, str] = self.connection.urls_by_queue
        return cache

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> Any:
        """Put a message, for a standard queue with the group of its tenant.

        In a FIFO queue, a group would change the order.
        """
        if can_delay(queue) and (group := group_of(message)):
            message["properties"]["MessageGroupId"] = group
        return super()._put(queue, message, **kwargs)

    def put_due(self, message: dict[str, Any], entry: StoreEntry) -> None:
        if can_delay(entry.queue or "") and (group := group_of(message)):
            message["properties"]["MessageGroupId"] = group
        super().put_due(message, entry)

    def _on_messages_ready(self, queue: str, qname: str, messages: Any) -> Any:
        # kombu reads an answer such as 503 as [], with which its worker ends (kombu 5.7).
        return super()._on_messages_ready(queue, qname, messages or {})

    def let_wait(self, queue: str, message: dict[str, Any], *, due_us: int, **kwargs: Any) -> Any:
        if not can_delay(queue):
            leave_to_celery(queue)
            return SQS.Channel._put(self, queue, message, **kwargs)
        self.delays.check_reach(due_us)
        return self.delays.publish(queue, message, due_us=due_us)

    def own_worker_part(self, settings: DelaySettings) -> WorkerPart:
        from .parts import SqsWorkerPart

        return SqsWorkerPart(self, settings)

    def own_admin_part(self, settings: DelaySettings) -> AdminPart:
        from .parts import SqsAdminPart

        return SqsAdminPart(self)


class Transport(DelayingTransport, SQS.Transport):  # type: ignore[misc]
    """kombu's SQS transport; with the option ``native_delay``, delayed messages wait in SQS."""

    delaying_channel = Channel

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.urls_by_queue: dict[str, str] = {}

    def own_outbox(self, window: int) -> Any:
        from .outbox import SqsOutbox

        return SqsOutbox(self.client, window)
