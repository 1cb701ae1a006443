"""How far each line of batches has come: what is stored under one number is not stored again.

A line's row is there before its first batch, so that a batch that is sent again waits for the
transaction of its first attempt, should that still be under way.
"""

from __future__ import annotations

from time import time_ns

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from .schema import LINES

_ROW = LINES.c

_THIS = _ROW.line == bindparam("one")
_ADVANCE = (
    update(LINES)
    .where(_THIS, _ROW.number == bindparam("last"))
    .values(number=_ROW.number + 1, used_us=bindparam("now"))
)
_FIND = select(_ROW.number).where(_THIS)

#: A day in microseconds: nobody sends a batch again for as long.
_KEPT_US = 86_400_000_000


def begin(connection: Connection, line: str) -> None:
    """Let *line*, 32 characters, begin with batch 1; forget those that nobody has ended."""
    now_us = time_ns() // 1000
    connection.execute(delete(LINES).where(_ROW.used_us < now_us - _KEPT_US))
    _add(connection, line, 0, now_us)


def advance(connection: Connection, line: str, number: int) -> bool:
    """Whether batch *number* of *line* is not stored yet; by this transaction it is."""
    now_us = time_ns() // 1000
    step = {"one": line, "last": number - 1, "now": now_us}
    if connection.execute(_ADVANCE, step).rowcount:
        return True
    if connection.execute(_FIND, {"one": line}).first() is not None:
        return False
    _add(connection, line, number, now_us)  # the tables were dropped meanwhile
    return True


def end(connection: Connection, line: str) -> None:
    """Forget *line*."""
    connection.execute(delete(LINES).where(_THIS), {"one": line})


def _add(connection: Connection, line: str, number: int, now_us: int) -> None:
    connection.execute(insert(LINES).values(line=line, number=number, used_us=now_us))
