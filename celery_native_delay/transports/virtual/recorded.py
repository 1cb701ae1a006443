"""Records beside the brokers on kombu's virtual transports that cannot be looked into."""

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
from ...errors import NoRecords
from ...keyed.publishing import KeyedPublish
from ...message import HEADER
from ...rates.line import Lines
from ...records.interface import IndexEntry, Records
from ...records.waiting import Waiting, WaitingTasks
from ...settings import DelaySettings
from ..interface import without_records
from ..recorded import lines_beside, member_of, records_beside
from . import delays
from .channel import DelayingChannel
from .collecting import Put
from .outbox import CallingOutbox
from .waiting import waiting_of
from .wrapping import due_then, encoded, wrapped

PutT = TypeVar("PutT", bound=Put)


class Delays(delays.Delays):
    """Delayed publishing on one channel, whose messages are noted in the records, if any."""

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        super().__init__(settings)
        self._channel = channel

    @cached_property
    def records(self) -> Any:
        """The records beside the queues of this name prefix; None where none are kept."""
        client, prefix = self._channel.connection.client, self._channel.queue_name_prefix
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
        """kombu's *message* as it waits for *queue*, with our header; or why it cannot.

        *delivery_id* tells this delivery from every other, None for a new one.
        """
        self.check_settings()
        properties = message["properties"]
        if delivery_id is None:
            info = properties.get("delivery_info") or {}
            if self.records is not None and info.get("exchange"):
                # It may lead to several queues, and each copy is an entry of its own.
                message = {**message, "properties": {**properties, "delivery_tag": str(uuid4())}}
            delivery_id = str(message["properties"]["delivery_tag"])
        due_ms = milliseconds_up(due_us)
        told = wrapped(message, due_ms=due_ms, delivery_id=delivery_id, cancelled=cancelled)
        return self._put(queue, told, due_us)

    @abstractmethod
    def _put(self, queue: str, message: dict[str, Any], due_us: int) -> Any:
        """A *message* that has our header, on its way to *queue*."""

    @abstractmethod
    def send(self, put: Any, *, now_us: int) -> None:
        """Send what :meth:`put_of` made, which has a *queue* and a *message*."""

    def publish(
        self,
        queue: str,
        message: dict[str, Any],
        *,
        due_us: int,
        delivery_id: str | None = None,
        recorded: bool = True,
    ) -> None:
        """Let kombu's *message* wait for *queue*; raises as :meth:`put_of` and :meth:`send`.

        It may be further away than a producer's limit, which :meth:`check_reach` holds. *recorded*:
        the records are told of it.
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

    def publish_keyed(self, keyed: KeyedPublish, queue: str, message: dict[str, Any]) -> None:
        """Send kombu's *message* as its key has it; raises as :meth:`publish`, AnotherStands."""

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
        """Send a delivery that the records decide about afterwards; its entry."""
        # SQS would take it for the message that it replaces, by their delivery tag.
        properties = {**message["properties"], "delivery_tag": delivery_id}
        own = due_then({**message, "properties": properties}, due_us)
        put = self.put_of(queue, own, due_us=due_us, delivery_id=delivery_id, cancelled=cancelled)
        self.send(put, now_us=now_us)
        return _entry_of(put)

    def note(self, put: Any) -> None:
        """Note down what is about to be sent, in the records if any are kept."""
        member = self._member_of(put)
        if member is not None:
            due_us = put.message["headers"][HEADER]["due"] * 1000
            self.records.note(IndexEntry(member, due_us, _entry_of(put)))

    def forget(self, put: Any) -> None:
        """Strike what the broker did not take."""
        member = self._member_of(put)
        if member is not None:
            self.records.forget(member)

    def _member_of(self, put: Any) -> str | None:
        headers = put.message.get("headers") or {}
        if self.records is None or HEADER not in headers:
            return None
        return member_of(headers, headers[HEADER]["id"])


def _entry_of(put: Any) -> str:
    """The entry of a message: its queue as JSON, a newline, and kombu's message."""
    return f"{dumps(put.queue)}\n{encoded(put.message)}"


class Republisher:
    """Reads entries of the records, and publishes their messages again, on one channel."""

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


class Channel(DelayingChannel):
    """A channel to a broker that cannot be looked into; its records list what waits, if any."""

    def let_wait_keyed(self, queue: str, message: dict[str, Any], keyed: KeyedPublish) -> Any:
        self.records(self.delays.settings)  # or the way out
        self.delays.publish_keyed(keyed, queue, message)

    def records(self, settings: DelaySettings) -> Records:
        records: Records | None = self.delays.records
        if records is None:
            raise without_records(self)
        return records

    def waiting_tasks(self: Any, settings: DelaySettings) -> WaitingTasks:
        """The tasks that wait on this broker, by the records; NoRecords without any."""
        if self.delays.records is None:
            raise NoRecords(
                f"{self.connection.client.as_uri()} does not show what waits and gives nothing "
                f"back before it is due: to list, cancel and move tasks, set native_delay_records "
                f'= "redis://…", or the SQLAlchemy URL of a database, in workers and producers'
            )
        tasks: WaitingTasks = self.delays.records.tasks(Republisher(self.delays))
        return tasks

    def lines(self, settings: DelaySettings) -> Lines:
        """The lines of rated tasks, which are kept in the records; NoRecords without any."""
        return lines_beside(self.delays.records)


class Outbox(CallingOutbox[PutT]):
    """An outbox that notes in the records what is to wait."""

    def take(self, put: PutT) -> None:
        if hasattr(self.channel, "delays"):
            self.channel.delays.note(put)
        super().take(put)

    def _refuse(self, reason: str, puts: Iterable[PutT]) -> None:
        refused = list(puts)
        for put in refused if hasattr(self.channel, "delays") else ():
            self.channel.delays.forget(put)
        super()._refuse(reason, refused)
