"""The SQL statements that select, change and delete waiting messages."""

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

#: How many messages a migration to another broker reads at once.
_CHUNK = 1000

#: The text in the column ``reason`` of a message that is being moved to another broker.
MOVING = "being moved"

_ROW = MESSAGES.c

SHOWN = (_ROW.id, _ROW.queue, _ROW.envelope, _ROW.due_us, _ROW.reason)


def behind(namespace: str, due_us: int, row_id: int) -> Select[Any]:
    """Return a SELECT for the next waiting messages after the row with *due_us* and *row_id*."""
    later = or_(_ROW.due_us > due_us, and_(_ROW.due_us == due_us, _ROW.id > row_id))
    waiting = select(*SHOWN).where(_ROW.namespace == namespace, _ROW.due_us.is_not(None), later)
    return waiting.order_by(_ROW.due_us, _ROW.id).limit(_CHUNK)


def as_it_was(row: Any) -> list[ColumnElement[bool]]:
    """Return WHERE conditions that match *row* only if the row is unchanged."""
    return [_ROW.id == row.id, _ROW.due_us == row.due_us, _ROW.envelope == row.envelope]


#: Messages that a dispatcher takes at once. More are no faster, and block other processes longer.
BATCH = 100

_MINE = (
    select(_ROW.id, _ROW.queue, _ROW.envelope, _ROW.attempts)
    .where(_ROW.namespace == bindparam("mine"))
    .limit(BATCH)
    .with_for_update(skip_locked=True)
)
#: Due messages, earliest first. Parameters: ``mine``, the namespace; ``until``, in microseconds.
DUE = _MINE.where(_ROW.due_us <= bindparam("until")).order_by(_ROW.due_us)
#: Parked messages. Parameters: ``mine``, the namespace; ``after``, an id.
PARKED = _MINE.where(_ROW.due_us.is_(None), _ROW.id > bindparam("after")).order_by(_ROW.id)

_REMOVE = delete(MESSAGES).where(_ROW.id.in_(bindparam("ids", expanding=True)))
_REFUSED = (
    update(MESSAGES)
    .where(_ROW.id == bindparam("one"))
    .values(due_us=bindparam("due"), attempts=bindparam("tries"), reason=bindparam("why"))
)


@dataclass
class DispatchBatch:
    """A batch of due messages that one transaction has locked."""

    connection: Connection
    messages: list[Any]
    """The locked rows: *id*, *queue*, *envelope* (kombu's JSON), *attempts* (failed deliveries)."""
    delivered: list[int] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    """New column values of the undelivered messages, for :meth:`settle`."""

    def settle(self) -> None:
        """Delete delivered messages; store the retry time and the error of undelivered messages."""
        if self.delivered:
            self.connection.execute(_REMOVE, {"ids": self.delivered})
        if self.refused:
            self.connection.execute(_REFUSED, self.refused)
