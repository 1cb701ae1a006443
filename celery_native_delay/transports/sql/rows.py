"""Messages of a store: looked at and changed one by one, or taken out together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    bindparam,
    delete,
    or_,
    select,
    update,
)

from .schema import MESSAGES

#: Messages that are moved to another broker are read so many at a time.
_CHUNK = 1000

#: The reason of a message that is being moved to another broker.
MOVING = "being moved"

_ROW = MESSAGES.c

SHOWN = (_ROW.id, _ROW.queue, _ROW.envelope, _ROW.due_us, _ROW.reason)


def behind(namespace: str, due_us: int, row_id: int) -> Select[Any]:
    """The next waiting messages, behind a due time and an id."""
    later = or_(_ROW.due_us > due_us, and_(_ROW.due_us == due_us, _ROW.id > row_id))
    waiting = select(*SHOWN).where(_ROW.namespace == namespace, _ROW.due_us.is_not(None), later)
    return waiting.order_by(_ROW.due_us, _ROW.id).limit(_CHUNK)


def as_it_was(row: Any) -> list[ColumnElement[bool]]:
    """The conditions that a message is still as *row* was read."""
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


@dataclass
class DispatchBatch:
    """Messages that this transaction alone has, and what became of them.

    Those that are neither :attr:`delivered` nor :attr:`put_off` are as they were.
    """

    connection: Connection
    messages: list[Any]
    """Rows with an *id*, a *queue*, an *envelope*, and *attempts* so far."""
    delivered: list[int] = field(default_factory=list)
    put_off: list[dict[str, Any]] = field(default_factory=list)
    """Of each, the parameters that change it; without a due time it is parked."""

    def settle(self) -> None:
        """Write down what became of them, in this transaction."""
        if self.delivered:
            self.connection.execute(_REMOVE, {"ids": self.delivered})
        if self.put_off:
            self.connection.execute(_PUT_OFF, self.put_off)
