"""Lines: who stores many messages, batch by batch, and repeats a batch that was not answered.

How far a line has come stands in a row of its own, which the transaction that stores a batch moves
on. So the batch is there once, however often it is stored, also when its messages are gone again.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import time_ns
from uuid import uuid4

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from .delays import Put
from .schema import LINES
from .store import ADD, Store

#: A line that has come no further for so long, a day in microseconds, is dead.
_DEAD_US = 86_400_000_000

_THIS = LINES.c.name == bindparam("this")
_MOVE_ON = (
    update(LINES)
    .where(_THIS, LINES.c.number == bindparam("last"))
    .values(number=LINES.c.number + 1, used_us=bindparam("now"))
)
_FIND = select(LINES.c.number).where(_THIS)
_REMOVE = delete(LINES).where(_THIS)
_REMOVE_DEAD = delete(LINES).where(LINES.c.used_us < bindparam("dead"))


class Line:
    """See the module's docstring. Every method raises StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self.name = uuid4().hex
        self._store = store

    def open(self) -> None:
        """Let batch 1 come.

        The row is there before it, so that a batch that is stored again waits for the transaction
        of its first attempt, should that still be under way.
        """

        def open_(connection: Connection) -> None:
            connection.execute(_REMOVE_DEAD, {"dead": _now_us() - _DEAD_US})
            self._add(connection, 0)

        self._store.change(open_)

    def store(self, number: int, puts: Sequence[Put]) -> None:
        """Have all of *puts* wait, as batch *number*; or none of them if this raises."""
        rows = [self._store.row(put.queue, put.envelope, put.due_us, put.task_id) for put in puts]

        def store(connection: Connection) -> None:
            if self._moves_on(connection, number):
                connection.execute(ADD, rows)

        with self._store.noticed():
            self._store.change(store)
        self._store.on_add(min(put.due_us for put in puts))

    def close(self) -> None:
        """No batch comes any more."""
        self._store.change(lambda connection: connection.execute(_REMOVE, {"this": self.name}))

    def _moves_on(self, connection: Connection, number: int) -> bool:
        """Whether *number* comes next; else it is there already."""
        step = {"this": self.name, "last": number - 1, "now": _now_us()}
        if connection.execute(_MOVE_ON, step).rowcount:
            return True
        if connection.execute(_FIND, {"this": self.name}).first() is not None:
            return False
        self._add(connection, number)  # the tables were dropped meanwhile
        return True

    def _add(self, connection: Connection, number: int) -> None:
        row = {"name": self.name, "number": number, "used_us": _now_us()}
        connection.execute(insert(LINES).values(row))


def _now_us() -> int:
    return time_ns() // 1000
