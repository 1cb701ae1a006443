"""Shared code for bulk publishing on kombu's virtual transports, also into a store."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from billiard.exceptions import SoftTimeLimitExceeded
from kombu.utils.json import dumps

from ...errors import NativeDelayError, RefusedMessage, StoreUnavailable
from ...store.interface import Row
from .. import outbox
from ..outbox import OutboxBatch, is_lasting_sql
from ..stored_bulk import StoredBatch, StoredMessage, packed, write
from .from_store import entry_of
from .template import CollectedMessage, refused_of

NOWHERE = "no queue is bound for it"


class PlainMessage(NamedTuple):
    """A message in kombu's format, and the message's destination queue."""

    queue: str
    message: dict[str, Any]
    due_us: int = 0

    @property
    def envelope(self) -> str:
        return str(dumps(self.message))

    @property
    def size_bytes(self) -> int:
        return len(self.message.get("body") or "")

    def another(self, envelope: str, *, due_us: int, task_id: str, delivery_tag: str) -> Self:
        raise NotImplementedError("only delayed messages have a template")


class Collecting:
    """A channel mixin that collects messages for a bulk publisher instead of sending."""

    collected: list[Any]
    #: Messages as JSON, for which no queue is bound. kombu would drop these messages.
    returned: list[bytes]
    _is_routed = False

    def put_for(self, queue: str, message: dict[str, Any]) -> Any:
        """Encode *message* for *queue*; the bulk publisher sends the result."""
        raise NotImplementedError

    def put_for_all(
        self, exchange: str, message: dict[str, Any], routing_key: str, *, due_us: int
    ) -> Any:
        """Encode a delayed message for a fanout exchange; the bulk publisher sends the result."""
        raise NotImplementedError

    def put_plainly(self, put: PlainMessage) -> None:
        """Send a message at once with kombu's ``_put``, without collecting the message."""
        message = put.message
        # Some of kombu's transports remove properties that they send elsewhere.
        message = {**message, "properties": dict(message["properties"])}
        super()._put(put.queue, message)  # type: ignore[misc]

    def basic_publish(
        self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any
    ) -> Any:
        self._is_routed = False
        result = super().basic_publish(message, exchange, routing_key, **kwargs)  # type: ignore[misc]
        if not self._is_routed:
            self.returned.append(dumps(message).encode())
        return result

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        self._is_routed = True
        self.collected.append(self.put_for(queue, message))

    def _put_fanout(
        self: Any, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any
    ) -> None:
        self._is_routed = True
        due_us = self.due_of(message)
        if due_us is None:
            super()._put_fanout(exchange, message, routing_key, **kwargs)  # type: ignore[misc]
        else:
            put = self.put_for_all(exchange, message, routing_key, due_us=due_us)
            self.collected.append(put)


MessageT = TypeVar("MessageT", bound=CollectedMessage)
BatchT = TypeVar("BatchT", bound=OutboxBatch[Any])


class VirtualOutbox(outbox.Outbox[MessageT, BatchT]):
    """Stores a bulk publisher's messages in memory until the broker's confirm."""

    collecting: ClassVar[type[Collecting]]
    """The channel mixin that collects the published messages."""

    def __init__(self, client: Any, window: int) -> None:
        super().__init__(client, window)
        self._already_named: set[tuple[str | None, str | None]] = set()

    def refuse_returned(self, envelopes: list[bytes]) -> None:
        self._refused += [replace(each, returned=True) for each in self._named(NOWHERE, envelopes)]

    def _prepare(self, channel: Any) -> None:
        """Prepare the broker for the first send on a new channel; subclasses override this."""

    def _opened(self, client: Any) -> Collecting:
        delaying = client.transport.delaying_channel
        channel: Collecting = type("BulkChannel", (self.collecting, delaying), {})(
            client.connection
        )
        client.connection.channels.append(channel)
        self._prepare(channel)
        return channel

    def _reports(self, reason: str, puts: Iterable[MessageT]) -> list[RefusedMessage]:
        return self._named(reason, [put.envelope for put in puts])

    def _named(self, reason: str, envelopes: Iterable[str | bytes]) -> list[RefusedMessage]:
        """Report each message once, even if the broker refuses its copies for several queues."""
        messages = {
            (message.delivery_id, message.task_id): message
            for message in (refused_of(reason, envelope) for envelope in envelopes)
        }
        new = messages.keys() - self._already_named
        self._already_named |= new
        return [message for key, message in messages.items() if key in new]


class NotTaken(Exception):
    """Raised if the broker rejects a whole batch; then each message is sent alone."""


class CallingOutbox(VirtualOutbox[MessageT, OutboxBatch[MessageT]]):
    """Sends the messages of a bulk publisher with blocking calls."""

    @abstractmethod
    def _deliver(self, batch: OutboxBatch[MessageT]) -> None:
        """Send the messages of *batch*; remove confirmed and refused messages from *batch*."""

    def _put_plainly(self, put: PlainMessage) -> None:
        try:
            self.channel.put_plainly(put)
        except (*self.lost, SoftTimeLimitExceeded):
            raise
        except Exception as error:  # whatever a transport raises
            raise NotTaken(f"{type(error).__name__}: {error}") from error

    def _write(self) -> None:
        self._connect()
        while self._batches:
            batch, reason = self._batches[0], None
            try:
                self._deliver(batch)
            except NotTaken as exc:
                if len(batch.puts) > 1:  # one message may be the reason
                    self._batches.popleft()
                    self._batches.extendleft(OutboxBatch([put]) for put in reversed(batch.puts))
                    continue
                reason = str(exc)
            except self.lost:
                raise
            except NativeDelayError as exc:
                reason = str(exc)
            self._settled(batch, batch.puts, reason=reason)
            self._batches.popleft()

    def _settled(
        self, batch: OutboxBatch[MessageT], puts: Sequence[MessageT], *, reason: str | None = None
    ) -> None:
        """Remove messages from *batch*; if *reason* is given, report the messages as refused."""
        if reason is not None:
            self._refuse(reason, puts)
        self._unanswered -= len(puts)
        gone = {id(put) for put in puts}
        batch.puts = [put for put in batch.puts if id(put) not in gone]


class StoreCollecting(Collecting):
    """A channel mixin that collects rows for the store, and other messages."""

    def put_for(self: Any, queue: str, message: dict[str, Any]) -> StoredMessage | PlainMessage:
        due_us = self.stored_us(message, self.due_of(message))
        return PlainMessage(queue, message) if due_us is None else self._row(message, queue, due_us)

    def put_for_all(
        self: Any, exchange: str, message: dict[str, Any], routing_key: str, *, due_us: int
    ) -> StoredMessage:
        stored: StoredMessage = self._row(message, None, due_us)
        return stored

    def _row(self: Any, message: dict[str, Any], queue: str | None, due_us: int) -> StoredMessage:
        self.check_reach(due_us)
        row = Row.of(entry_of(message, queue, due_us=due_us))
        return StoredMessage(row, joined=self.let_join(message.get("headers")))


class StoreOutbox(CallingOutbox[Any]):
    """Writes delayed tasks into the store, and sends other messages to the broker."""

    collecting = StoreCollecting

    def __init__(self, client: Any, window: int) -> None:
        super().__init__(client, window)
        self.lost = (*self.lost, StoreUnavailable, *client.recoverable_connection_errors)

    def is_lasting(self, error: BaseException) -> bool:
        return is_lasting_sql(error) or super().is_lasting(error)

    def _prepare(self, channel: Any) -> None:
        channel.needed_store.prepare()

    def _packed(self, puts: list[Any]) -> Iterable[OutboxBatch[Any]]:
        stored, others = packed(puts)
        yield from stored
        yield from (OutboxBatch([put]) for put in others)

    def _join(self, puts: list[Any]) -> dict[str, list[Any]]:
        self._connect()
        return write(self.channel.needed_store, puts)

    def _deliver(self, batch: OutboxBatch[Any]) -> None:
        if not isinstance(batch, StoredBatch):
            self._put_plainly(batch.puts[0])
            return
        for reason, puts in write(self.channel.needed_store, batch.puts).items():
            self._settled(batch, puts, reason=reason)

    def _reports(self, reason: str, puts: Iterable[Any]) -> list[RefusedMessage]:
        stored, others = packed(list(puts))
        reports = [put.refused(reason) for each in stored for put in each.puts]
        return reports + super()._reports(reason, others)
