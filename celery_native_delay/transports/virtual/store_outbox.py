"""Publish in bulk while tasks wait in a store: rows in batches, other messages one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import RefusedMessage, StoreUnavailable
from ...store.interface import Row
from ..bulk_publisher import BulkPublisher
from ..lasting import is_lasting_sql
from ..outbox import OutboxBatch
from ..stored_bulk import StoredBatch, StoredMessage, packed, template_class, write
from .collecting import Collecting, PlainMessage
from .from_store import entry_of
from .outbox import CallingOutbox
from .template import VirtualTaskTemplate


class StoreCollecting(Collecting):
    """A channel mixin that collects rows for the store, and other messages."""

    def put_for(self: Any, queue: str, message: dict[str, Any]) -> StoredMessage | PlainMessage:
        found = self._stored(message, queue)
        return found or PlainMessage(queue, message)

    def put_for_all(
        self: Any, exchange: str, message: dict[str, Any], routing_key: str, *, due_us: int
    ) -> StoredMessage:
        self.check_reach(due_us)
        row = Row.of(entry_of(message, None, due_us=due_us))
        return StoredMessage(row, joined=self.joins(message.get("headers")))

    def _stored(self: Any, message: dict[str, Any], queue: str) -> StoredMessage | None:
        due_us = self.stored_us(message, self.due_of(message))
        if due_us is None:
            return None
        self.check_reach(due_us)
        row = Row.of(entry_of(message, queue, due_us=due_us))
        return StoredMessage(row, joined=self.joins(message.get("headers")))


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


def store_publisher(client: Any, window: int) -> BulkPublisher:
    """Return a bulk publisher of an app whose tasks wait in a store."""
    return BulkPublisher(StoreOutbox(client, window), template_class(VirtualTaskTemplate))
