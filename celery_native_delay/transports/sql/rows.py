"""Looking into a store, and changing it, message by message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, delete, or_, select, update

from .schema import MESSAGES

#: Messages that are moved to another broker are read so many at a time.
_CHUNK = 1000

#: The reason of a message that is being moved to another broker.
_MOVING = "being moved"

_ROW = MESSAGES.c

SHOWN = (_ROW.id, _ROW.queue, _ROW.envelope, _ROW.due_us)


@dataclass(frozen=True)
class Row:
    """A message as it lies there; *due_us* is None for one that is parked."""

    id: int
    queue: str
    envelope: str
    due_us: int | None


class Rows:
    """Those of one namespace, in one transaction."""

    def __init__(self, connection: Connection, namespace: str, *, to_change: bool) -> None:
        self._connection = connection
        self._mine = _ROW.namespace == namespace
        self._to_change = to_change

    def of(self, task_id: str) -> list[Row]:
        """Rows that wait or are parked under *task_id*; locked, if they are to be changed."""
        statement = (
            select(*SHOWN).where(self._mine, _ROW.task_id == task_id[:255]).order_by(_ROW.due_us)
        )
        if self._to_change:
            statement = statement.with_for_update()
        return [Row(*row) for row in self._connection.execute(statement).all()]

    def after(self, due_us: int, row_id: int) -> list[tuple[Row, bool]]:
        """The next of what waits, behind a due time and an id; and whether it was being moved."""
        behind = or_(_ROW.due_us > due_us, and_(_ROW.due_us == due_us, _ROW.id > row_id))
        statement = (
            select(*SHOWN, _ROW.reason)
            .where(self._mine, _ROW.due_us.is_not(None), behind)
            .order_by(_ROW.due_us, _ROW.id)
            .limit(_CHUNK)
        )
        found = self._connection.execute(statement).all()
        return [(Row(*values), reason == _MOVING) for *values, reason in found]

    def mark_moving(self, row: Row) -> bool:
        """Note that *row* is being moved to another broker; False if it is not as it was."""
        marked = update(MESSAGES).where(*_as_it_was(row)).values(reason=_MOVING)
        return bool(self._connection.execute(marked).rowcount)

    def remove_as_it_was(self, row: Row) -> bool:
        """Remove *row*; False if it is not there any more as it was."""
        removed = delete(MESSAGES).where(*_as_it_was(row))
        return bool(self._connection.execute(removed).rowcount)

    def replace(self, row: Row, envelope: str, due_us: int) -> None:
        self._connection.execute(
            update(MESSAGES)
            .where(_ROW.id == row.id)
            .values(envelope=envelope, due_us=due_us, attempts=0, reason=None)
        )

    def remove(self, row: Row) -> None:
        self._connection.execute(delete(MESSAGES).where(_ROW.id == row.id))


def _as_it_was(row: Row) -> list[Any]:
    return [_ROW.id == row.id, _ROW.due_us == row.due_us, _ROW.envelope == row.envelope]
