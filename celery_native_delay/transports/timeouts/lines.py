"""Lines: who stores many messages, batch by batch, and repeats a batch that was not answered.

How far a line has come stands in a row of its own, which the transaction that stores a batch moves
on. So the batch is there once, however often it is stored, also when its messages are gone again.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import time_ns
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, bindparam, delete, exc, select, update

from ...core.errors import StoreUnavailable
from .delays import Put
from .schema import MESSAGES
from .store import ADD, Store

#: The namespace of these rows, and of no message: no setting may hold it. The task id of one is
#: the name of its line and the number of the last batch that is stored.
_NAMESPACE = "#lines"

#: A line that has come no further for so long, a day in microseconds, is dead.
_DEAD_US = 86_400_000_000

_ROW = MESSAGES.c
_AT = (_ROW.namespace == _NAMESPACE, _ROW.task_id == bindparam("at"))
_MOVE_ON = update(MESSAGES).where(*_AT).values(task_id=bindparam("to"), due_us=bindparam("now"))
_FIND = select(_ROW.id).where(*_AT)
_REMOVE = delete(MESSAGES).where(*_AT)
_REMOVE_DEAD = delete(MESSAGES).where(_ROW.namespace == _NAMESPACE, _ROW.due_us < bindparam("dead"))


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
            connection.execute(ADD, self._row(0))

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

    def close(self, number: int) -> None:
        """No batch comes after *number*."""
        self._store.change(lambda connection: connection.execute(_REMOVE, self._at(number)))

    def _moves_on(self, connection: Connection, number: int) -> bool:
        """Whether *number* comes next; else it is there already."""
        step = {**self._at(number - 1), "to": self._at(number)["at"], "now": _now_us()}
        if connection.execute(_MOVE_ON, step).rowcount:
            return True
        if connection.execute(_FIND, self._at(number)).first() is not None:
            return False
        connection.execute(ADD, self._row(number))  # the tables were dropped meanwhile
        return True

    def _at(self, number: int) -> dict[str, str]:
        return {"at": f"{self.name}:{number}"}

    def _row(self, number: int) -> dict[str, Any]:
        row = self._store.row("", "", _now_us(), self._at(number)["at"])
        return {**row, "namespace": _NAMESPACE}


def is_about_a_row(error: StoreUnavailable) -> bool:
    """Whether the database does not like what it was given, and would take something else."""
    return isinstance(error.__cause__, exc.DataError | exc.IntegrityError)


def _now_us() -> int:
    return time_ns() // 1000
