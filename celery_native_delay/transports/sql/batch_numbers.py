"""Numbered batches of messages, which are stored once however often an outbox repeats them.

The number of the last batch of an outbox stands in a row of its own, which the transaction that
stores a batch moves on. So the batch is there once, also when its messages are gone again.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import time_ns
from uuid import uuid4

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from .delays import Put
from .schema import OUTBOXES
from .store import ADD, Store

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

        with self._store.noticed():
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
