"""Messages that are taken out of the store together, in one transaction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, bindparam, delete, select, update

from .schema import MESSAGES

#: Messages that are taken at a time. More are no faster, and keep others waiting longer.
BATCH = 100

_ROW = MESSAGES.c

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
