"""Many messages into a store: a hundred in a transaction, none twice whatever is lost on the way.

Each batch has a number, which the transaction that stores it writes into a row of its outbox. One
that is done again, because its commit was not answered, finds its number and changes nothing:
neither for a message that still waits, nor for one that has been handed over since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import time_ns
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from ...errors import StoreUnavailable
from ..lasting import is_lasting_sql
from ..outbox import Batch
from ..virtual.collecting import Collecting, PlainPut
from ..virtual.outbox import CallingOutbox, NotTaken
from .delays import BROADCAST, Put
from .schema import OUTBOXES
from .store import ADD, Store, is_about_a_row

#: A row that was not moved on for so long, a day in microseconds, is an outbox' that has died.
_DEAD_US = 86_400_000_000

_THIS = OUTBOXES.c.name == bindparam("this")
_MOVE_ON = (
    update(OUTBOXES)
    .where(_THIS, OUTBOXES.c.number == bindparam("last"))
    .values(number=OUTBOXES.c.number + 1, used_us=bindparam("now"))
)
_FIND = select(OUTBOXES.c.number).where(_THIS)
_REMOVE = delete(OUTBOXES).where(_THIS)
_REMOVE_DEAD = delete(OUTBOXES).where(OUTBOXES.c.used_us < bindparam("dead"))


class StoreCollecting(Collecting):
    """A channel that collects messages as they are stored."""

    def put_for(self: Any, queue: str, message: dict[str, Any]) -> Put | PlainPut:
        due_us = self.due_of(message)
        if due_us is None:
            return PlainPut(queue, message)
        return self.delays.stored(message, queue, due_us=due_us)  # type: ignore[no-any-return]

    def put_for_all(
        self: Any, exchange: str, message: dict[str, Any], routing_key: str, *, due_us: int
    ) -> Put:
        return self.delays.stored(message, BROADCAST, due_us=due_us)  # type: ignore[no-any-return]


class Outbox(CallingOutbox[Put | PlainPut]):
    """Many messages into a store, a hundred in a transaction; others go to the broker as ever."""

    collecting = StoreCollecting

    def __init__(self, client: Any, window: int) -> None:
        super().__init__(client, window)
        self.lost = (*self.lost, StoreUnavailable, *client.recoverable_connection_errors)
        self._numbered: NumberedBatches | None = None
        #: Of the last batch that is stored.
        self._number = 0

    def is_lasting(self, error: BaseException) -> bool:
        return is_lasting_sql(error) or super().is_lasting(error)

    def _prepare(self, channel: Any) -> None:
        channel.delays.store.prepare()
        if self._numbered is None:
            batches = NumberedBatches(channel.delays.store)
            batches.open()
            self._numbered = batches

    def _packed(self, puts: list[Put | PlainPut]) -> Iterable[Batch[Put | PlainPut]]:
        waiting = [put for put in puts if isinstance(put, Put)]
        if waiting:
            yield Batch(waiting)
        for put in puts:
            if isinstance(put, PlainPut):
                yield Batch([put])

    def _deliver(self, batch: Batch[Put | PlainPut]) -> None:
        if isinstance(plain := batch.puts[0], PlainPut):  # the only one
            self._put_plainly(plain)
            return
        waiting = [put for put in batch.puts if isinstance(put, Put)]
        assert self._numbered is not None
        try:
            self._numbered.store(self._number + 1, waiting)
        except StoreUnavailable as error:
            if is_about_a_row(error):
                raise NotTaken(str(error)) from error
            raise
        self._number += 1
        self.channel.delays.watch()

    def _forget(self) -> None:
        if self._numbered is not None:
            self._numbered.close()


class NumberedBatches:
    """The batches of one outbox. Every method raises StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self.name = uuid4().hex
        self._store = store

    def open(self) -> None:
        """Make the row, so that batch 1 may come.

        It is there before it, so that a batch that is stored again waits for the transaction
        of its first attempt, should that still be under way.
        """

        def open_(connection: Connection) -> None:
            connection.execute(_REMOVE_DEAD, {"dead": _now_us() - _DEAD_US})
            self._add(connection, 0)

        self._store.change(open_)

    def store(self, number: int, puts: Sequence[Put]) -> None:
        """Store all of *puts* as batch *number*; or none of them if this raises."""
        rows = [self._store.row(put.queue, put.envelope, put.due_us, put.task_id) for put in puts]

        def store(connection: Connection) -> None:
            if self._moves_on(connection, number):
                connection.execute(ADD, rows)

        self._store.change(store)
        self._store.on_add(min(put.due_us for put in puts))

    def close(self) -> None:
        """Remove the row: no batch comes any more."""
        self._store.change(lambda connection: connection.execute(_REMOVE, {"this": self.name}))

    def _moves_on(self, connection: Connection, number: int) -> bool:
        """True if *number* comes next; else it is there already."""
        step = {"this": self.name, "last": number - 1, "now": _now_us()}
        if connection.execute(_MOVE_ON, step).rowcount:
            return True
        if connection.execute(_FIND, {"this": self.name}).first() is not None:
            return False
        self._add(connection, number)  # the tables were dropped meanwhile
        return True

    def _add(self, connection: Connection, number: int) -> None:
        row = {"name": self.name, "number": number, "used_us": _now_us()}
        connection.execute(insert(OUTBOXES).values(row))


def _now_us() -> int:
    return time_ns() // 1000
