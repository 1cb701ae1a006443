"""Shared code for SQS and pgmq, which cannot list their waiting messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from functools import cached_property
from json import loads as plain_loads
from time import time_ns
from typing import Any, TypeVar
from uuid import uuid4

from kombu.utils.json import dumps, loads

from ...due_time import check_due, milliseconds_up
from ...message import HEADER
from ...records.interface import IndexEntry
from ...records.publishing import RecordedPublish
from ...records.waiting import Waiting
from ...settings import DelaySettings
from ..recorded import RecordedChannel, member_of, records_beside
from . import delays
from .channel import DelayingChannel
from .collecting import CollectedMessage
from .outbox import CallingOutbox
from .waiting import waiting_of
from .wrapping import due_then, encoded, wrapped

MessageT = TypeVar("MessageT", bound=CollectedMessage)


class Delays(delays.Delays):
    """Publishes delayed messages; stores copies if ``native_delay_records`` is set."""

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        super().__init__(settings)
        self._channel = channel

    @cached_property
    def records(self) -> Any:
        """Return the storage that ``native_delay_records`` names; None if not set."""
        client = self._channel.connection.client
        prefix = getattr(self._channel, "queue_name_prefix", "")
        return records_beside(self.settings, f"{client.virtual_host}.{prefix}")

    def put_of(
        self,
        queue: str,
        message: dict[str, Any],
        *,
        due_us: int,
        delivery_id: str | None = None,
        cancelled: bool = False,
    ) -> Any:
        """Add this package's header to *message*, and encode *message* for *queue*.

        If *delivery_id* is None, the delivery id is kombu's delivery tag. *cancelled* marks the
        task as cancelled.
        """
        self.check_settings()
        properties = message["properties"]
        if delivery_id is None:
            info = properties.get("delivery_info") or {}
            if self.records is not None and info.get("exchange"):
                # Each copy for one of several queues needs its own entry in the records.
                message = {**message, "properties": {**properties, "delivery_tag": str(uuid4())}}
            delivery_id = str(message["properties"]["delivery_tag"])
        due_ms = milliseconds_up(due_us)
        told = wrapped(message, due_ms=due_ms, delivery_id=delivery_id, cancelled=cancelled)
        return self._put(queue, told, due_us)

    @abstractmethod
    def _put(self, queue: str, message: dict[str, Any], due_us: int) -> Any:
        """Encode a message that already has this package's header."""

    @abstractmethod
    def send(self, put: Any, *, now_us: int) -> None:
        """Send a message that :meth:`put_of` has encoded."""

    def publish(
        self,
        queue: str,
        message: dict[str, Any],
        *,
        due_us: int,
        delivery_id: str | None = None,
        recorded: bool = True,
    ) -> None:
        """Publish a delayed message for *queue*; store a copy if *recorded* is True.

        *delivery_id* is as in :meth:`put_of`. Without ``native_delay_records``, no copy is stored.
        """
        put = self.put_of(queue, message, due_us=due_us, delivery_id=delivery_id)
        if recorded:
            self.note(put)
        try:
            self.send(put, now_us=time_ns() // 1000)
        except Exception:
            if recorded:
                self.forget(put)
            raise

    def publish_keyed(self, keyed: RecordedPublish, queue: str, message: dict[str, Any]) -> None:
        """Publish a message with a debounce, throttle or unique key."""

        def put(due_us: int, delivery_id: str, clock_ahead_us: int) -> IndexEntry:
            now_us = time_ns() // 1000 - clock_ahead_us
            longest_seconds = self.settings.longest_delay_seconds
            check_due(due_us, now_us=now_us, longest_delay_seconds=longest_seconds)
            entry = self.send_undecided(queue, message, due_us, delivery_id, now_us=now_us)
            return IndexEntry(f"{keyed.task_id}:{delivery_id}", due_us, entry)

        keyed.settle(self.records, put)

    def send_undecided(
        self,
        queue: str,
        message: dict[str, Any],
        due_us: int,
        delivery_id: str,
        *,
        now_us: int,
        cancelled: bool = False,
    ) -> str:
        """Send a message marked as undecided; return a copy for the list of waiting tasks.

        The mark is in the records: :meth:`.Index.look` sets the mark, and then
        :meth:`.Index.compare_and_set` removes it. A worker drops a message that still has the mark.
        """
        # With the old delivery tag SQS would drop the message as a duplicate.
        properties = {**message["properties"], "delivery_tag": delivery_id}
        own = due_then({**message, "properties": properties}, due_us)
        put = self.put_of(queue, own, due_us=due_us, delivery_id=delivery_id, cancelled=cancelled)
        self.send(put, now_us=now_us)
        return _entry_of(put)

    def note(self, put: Any) -> None:
        """Store a copy of a message before the send, if ``native_delay_records`` is set."""
        member = self._member_of(put)
        if member is not None:
            due_us = put.message["headers"][HEADER]["due"] * 1000
            self.records.note(IndexEntry(member, due_us, _entry_of(put)))

    def forget(self, put: Any) -> None:
        """Delete the stored copy of a message that the broker refused."""
        member = self._member_of(put)
        if member is not None:
            self.records.forget(member)

    def _member_of(self, put: Any) -> str | None:
        headers = put.message.get("headers") or {}
        if self.records is None or HEADER not in headers:
            return None
        return member_of(headers, headers[HEADER]["id"])


def _entry_of(put: Any) -> str:
    """Return the copy of a message: queue name as JSON, newline, kombu's message."""
    return f"{dumps(put.queue)}\n{encoded(put.message)}"


class Republisher:
    """Publishes waiting messages again from the stored copies."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        self.check_reach = delays.check_reach

    def waiting(self, member: str, entry: str, due_us: int) -> Waiting | None:
        queue, _, envelope = entry.partition("\n")
        return waiting_of(envelope, queue=plain_loads(queue), due_us=due_us)

    def publish_again(self, entry: str, due_us: int, delivery_id: str, *, cancelled: bool) -> str:
        queue, _, envelope = entry.partition("\n")
        now_us, message = time_ns() // 1000, loads(envelope)
        return self._delays.send_undecided(
            loads(queue), message, due_us, delivery_id, now_us=now_us, cancelled=cancelled
        )


class Channel(RecordedChannel, DelayingChannel):
    """A channel to SQS or pgmq that can delay messages."""

    republisher = Republisher

    def let_wait_keyed(self, queue: str, message: dict[str, Any], keyed: RecordedPublish) -> Any:
        self.records(self.delays.settings)  # raises without records
        self.delays.publish_keyed(keyed, queue, message)


class Outbox(CallingOutbox[MessageT]):
    """Publishes messages in bulk to SQS or pgmq, and stores copies of delayed messages."""

    def take(self, put: MessageT) -> None:
        self.channel.delays.note(put)
        super().take(put)

    def _refuse(self, reason: str, puts: Iterable[MessageT]) -> None:
        refused = list(puts)
        for put in refused:
            self.channel.delays.forget(put)
        super()._refuse(reason, refused)
