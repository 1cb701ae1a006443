"""Publish in bulk into a database: 100 messages per transaction, without duplicates.

Each transaction also writes the batch's number. If the answer to a commit is lost, the batch is
sent again. If the number is already stored, the transaction inserts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection

from ...errors import RecordsUnavailable, StoreUnavailable
from ...now import time_ns
from ...records.database import is_about_a_row
from ...records.interface import Change, RecordName
from ..lasting import is_lasting_sql
from ..outbox import OutboxBatch
from ..virtual.collecting import Collecting, PlainMessage
from ..virtual.outbox import CallingOutbox, NotTaken
from .delays import BROADCAST, StoreMessage
from .store import ADD, Store

#: A day, in microseconds. The record of a bulk publisher is kept for so long after its last batch.
_KEPT_US = 86_400_000_000


class StoreCollecting(Collecting):
    def put_for(self: Any, queue: str, message: dict[str, Any]) -> StoreMessage | PlainMessage:
        due_us = self.due_of(message)
        if due_us is None:
            return PlainMessage(queue, message)
        return self.delays.stored(message, queue, due_us=due_us)  # type: ignore[no-any-return]

    def put_for_all(
        self: Any, exchange: str, message: dict[str, Any], routing_key: str, *, due_us: int
    ) -> StoreMessage:
        return self.delays.stored(message, BROADCAST, due_us=due_us)  # type: ignore[no-any-return]


class Outbox(CallingOutbox[StoreMessage | PlainMessage]):
    """Inserts delayed messages in bulk, and sends immediate messages to the broker."""

    collecting = StoreCollecting

    def __init__(self, client: Any, window: int) -> None:
        super().__init__(client, window)
        self.lost = (
            *self.lost,
            RecordsUnavailable,
            StoreUnavailable,
            *client.recoverable_connection_errors,
        )
        self._numbered: NumberedBatches | None = None
        #: The number of the last batch that was stored.
        self._number = 0

    def is_lasting(self, error: BaseException) -> bool:
        return is_lasting_sql(error) or super().is_lasting(error)

    def _prepare(self, channel: Any) -> None:
        channel.delays.store.prepare()
        if self._numbered is None:
            self._numbered = NumberedBatches(channel.delays.store)

    def _packed(
        self, puts: list[StoreMessage | PlainMessage]
    ) -> Iterable[OutboxBatch[StoreMessage | PlainMessage]]:
        waiting = [put for put in puts if isinstance(put, StoreMessage)]
        if waiting:
            yield OutboxBatch(waiting)
        for put in puts:
            if isinstance(put, PlainMessage):
                yield OutboxBatch([put])

    def _deliver(self, batch: OutboxBatch[StoreMessage | PlainMessage]) -> None:
        if isinstance(plain := batch.puts[0], PlainMessage):  # the only one
            self._put_plainly(plain)
            return
        waiting = [put for put in batch.puts if isinstance(put, StoreMessage)]
        assert self._numbered is not None
        try:
            self._numbered.store(self._number + 1, waiting)
        except (RecordsUnavailable, ValueError) as error:
            if is_about_a_row(error) or is_about_a_row(error.__cause__):
                raise NotTaken(str(error)) from error
            raise
        self._number += 1
        self.channel.delays.watch()

    def _forget(self) -> None:
        if self._numbered is not None:
            self._numbered.close()


class NumberedBatches:
    """Inserts the batches of a bulk publisher into the database, each batch once."""

    def __init__(self, store: Store) -> None:
        self._name = RecordName("outbox", uuid4().hex)
        self._store = store

    def store(self, number: int, puts: Sequence[StoreMessage]) -> None:
        """Insert all messages of a batch in one transaction; ignore an already stored batch."""
        records = self._store.records
        rows = [self._store.row(put.queue, put.envelope, put.due_us, put.task_id) for put in puts]

        def stored(connection: Connection) -> None:
            # The lock waits for the transaction of an earlier attempt.
            last = records.read_row(connection, self._name, locked=True)
            if last is None or int(last[0]) < number:
                kept_us = time_ns() // 1000 + _KEPT_US
                records.write_row(connection, self._name, str(number), kept_us, last is not None)
                connection.execute(ADD, rows)

        records.do(stored)
        self._store.on_add(min(put.due_us for put in puts))

    def close(self) -> None:
        """Delete the row with the last batch number of this bulk publisher."""
        self._store.records.change(self._name, lambda _: Change(None, 0, None))
