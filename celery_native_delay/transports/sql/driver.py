"""Transactions in the driver's own words.

SQLAlchemy takes longer to pass a statement on than SQLite to carry it out: through it, a publish
would take a fifth longer, and a debounce twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from sqlalchemy import Connection, Engine, Executable

T = TypeVar("T")

#: Carries out a statement with values for its parameters; returns the rows that it finds.
Say: TypeAlias = Callable[[Any, Mapping[str, Any]], Sequence[Any]]


class Disliked(Exception):
    """The driver or its database did not like it, as the cause tells; nothing was stored."""


class _Words(NamedTuple):
    """A statement as the driver has it: its parameters in *order*, or None if they have names.

    *known* has a value for each of them, of use where the statement brings it along.
    """

    text: str
    order: Sequence[str] | None
    known: Mapping[str, Any]


class Driver:
    """The driver below an *engine*, whose pool lends the connections."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # SQLite's transactions begin where we say so, see database.py.
        self._begin = "BEGIN IMMEDIATE" if engine.dialect.name == "sqlite" else None
        self._known: dict[Executable, _Words] = {}

    def do(self, work: Callable[[Say], T], *, single: bool = False) -> T:
        """The answer of *work*, which is done in a transaction; *single*: in one statement.

        Raises Disliked, and errors of the driver or of SQLAlchemy: whether it was done is unknown.
        """
        connection = self._engine.raw_connection()
        try:
            cursor = connection.cursor()
            try:
                if self._begin is not None and not single:
                    cursor.execute(self._begin)
                answer = work(partial(self._say, cursor))
            except self._engine.dialect.loaded_dbapi.Error as error:
                connection.invalidate()
                raise Disliked from error
            cursor.close()
            connection.commit()
        finally:
            connection.close()
        return answer

    def _say(self, cursor: Any, statement: Executable, values: Mapping[str, Any]) -> Sequence[Any]:
        words = self._known.get(statement)
        if words is None:
            words = self._known[statement] = self._words(statement, values)
        given = {**words.known, **values}
        order = words.order
        cursor.execute(words.text, given if order is None else [given[name] for name in order])
        found: Sequence[Any] = cursor.fetchall() if cursor.description else ()
        return found

    def _words(self, statement: Any, values: Mapping[str, Any]) -> _Words:
        compiled = statement.compile(dialect=self._engine.dialect, column_keys=list(values))
        return _Words(compiled.string, getattr(compiled, "positiontup", None), compiled.params)


def saying(connection: Connection) -> Say:
    """The long way, through SQLAlchemy's *connection*."""

    def say(statement: Any, values: Mapping[str, Any]) -> Sequence[Any]:
        result = connection.execute(statement, values)
        return result.all() if result.returns_rows else ()

    return say
