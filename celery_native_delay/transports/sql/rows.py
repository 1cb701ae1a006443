"""Messages of a store: looked at and changed one by one, or taken out together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, and_, bindparam, delete, or_, select, update

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


#: Messages that are taken at a time. More are no faster, and keep others waiting longer.
BATCH = 100

_MINE = (
    select(_ROW.id, _ROW.queue, _ROW.envelope, _ROW.attempts)
    .where(_ROW.namespace == bindparam("mine"))
    .limit(BATCH)
    .with_for_update(skip_locked=True)
)
#: What is due, earliest first. Parameters: ``mine``, the namespace; ``until``, in microseconds.
DUE = _MINE.where(_ROW.due_us <= bindparam("until")).order_by(_ROW.due_us)
#: What is parked. Parameters: ``mine``, the namespace; ``after``, an id.
PARKED = _MINE.where(_ROW.due_us.is_(None), _ROW.id > bindparam("after")).order_by(_ROW.id)

_REMOVE = delete(MESSAGES).where(_ROW.id.in_(bindparam("ids", expanding=True)))
_PUT_OFF = (
    update(MESSAGES)
    .where(_ROW.id == bindparam("one"))
    .values(due_us=bindparam("due"), attempts=bindparam("tries"), reason=bindparam("why"))
)


@dataclass(frozen=True)
class Stored:
    """A message that was taken out of the store, and stays there unless it is handed over."""

    id: int
    queue: str
    envelope: str
    attempts: int


@dataclass
class Batch:
    """Messages that this transaction alone has, and what became of them.

    Those that are neither :attr:`delivered` nor :attr:`put_off` are as they were.
    """

    connection: Connection
    messages: list[Stored]
    delivered: list[int] = field(default_factory=list)
    put_off: list[dict[str, Any]] = field(default_factory=list)
    """Of each, the parameters that change it; without a due time it is parked."""

    def settle(self) -> None:
        """Write down what became of them, in this transaction."""
        if self.delivered:
            self.connection.execute(_REMOVE, {"ids": self.delivered})
        if self.put_off:
            self.connection.execute(_PUT_OFF, self.put_off)
