"""Lists and searches the waiting tasks in a database table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice, pairwise
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Select, func, select

from .interface import T
from .waiting import ALL, Query, Waiting, WaitingPage, WaitingTasks

#: Rows that one query of a search reads, and intervals that one query counts.
_CHUNK = 1000
_COUNTS = 100


class SqlListing(WaitingTasks):
    """Lists and searches waiting tasks in a database table with one row per message."""

    def __init__(
        self,
        mine: ColumnElement[bool],
        due_us: Column[Any],
        key: Column[Any],
        text: Column[Any],
        shown: Sequence[Column[Any]],
    ) -> None:
        """Set the columns to sort by (*due_us*, *key*), to search (*text*), to return (*shown*).

        *mine* is the SQL condition that selects the waiting messages of one app.
        """
        self._mine = mine
        self._due_us = due_us
        self._text = text
        self._key = key
        self._shown = shown

    @abstractmethod
    def _look_up(self, work: Callable[[Connection], T]) -> T:
        """Call the function *work* in a read-only transaction, and return the result."""

    @abstractmethod
    def _decoded(self, row: Any) -> Waiting | None:
        """Convert a row to a waiting task, or to None if the task is cancelled."""

    def count(self, query: Query = ALL) -> int:
        def counted(connection: Connection) -> int:
            if query.is_by_time_only:
                return self._count(connection, query.from_us, query.until_us)
            return sum(1 for _ in self._matching(connection, query))

        return self._look_up(counted)

    def page(self, query: Query = ALL, *, offset: int = 0, limit: int = 50) -> WaitingPage:
        def paged(connection: Connection) -> WaitingPage:
            if not query.is_by_time_only:
                matching = self._matching(connection, query)
                return WaitingPage(tuple(islice(matching, offset, offset + limit)), None)
            total = self._count(connection, query.from_us, query.until_us)
            # The page is filled up from the next rows if some are not shown.
            tasks = self._matching(connection, query, offset, chunk=max(1, min(limit, _CHUNK)))
            return WaitingPage(tuple(islice(tasks, limit)), total)

        return self._look_up(paged)

    def counts(self, edges_us: Sequence[int]) -> list[int]:
        counts = [self._counted(*pair).scalar_subquery() for pair in pairwise(edges_us)]

        def counted(connection: Connection) -> list[int]:
            found: list[int] = []
            for start in range(0, len(counts), _COUNTS):
                found += connection.execute(select(*counts[start : start + _COUNTS])).one()
            return found

        return self._look_up(counted)

    def span(self) -> tuple[int, int] | None:
        asked = select(func.min(self._due_us), func.max(self._due_us)).where(self._mine)
        first_us, last_us = self._look_up(lambda connection: connection.execute(asked).one())
        return None if first_us is None else (int(first_us), int(last_us))

    def _count(self, connection: Connection, from_us: int | None, until_us: int | None) -> int:
        return int(connection.execute(self._counted(from_us, until_us)).scalar() or 0)

    def _counted(self, from_us: int | None, until_us: int | None) -> Select[Any]:
        asked = select(func.count()).select_from(self._due_us.table)
        return asked.where(*self._between(from_us, until_us))

    def _matching(
        self, connection: Connection, query: Query, offset: int = 0, *, chunk: int = _CHUNK
    ) -> Iterator[Waiting]:
        """Yield the tasks that match *query*, earliest first; read *chunk* rows at a time.

        *offset* counts rows that SQL selects, not matching tasks. So use *offset* only if
        ``query.is_by_time_only`` is True.
        """
        conditions = self._between(query.from_us, query.until_us)
        if query.needle:
            conditions.append(self._text.icontains(query.needle, autoescape=True))
        in_order = self._due_us, self._key
        # The index alone finds the keys, however many rows are skipped.
        keys = select(self._key).where(*conditions).order_by(*in_order)
        for start in count(offset, chunk):
            these = keys.offset(start).limit(chunk).subquery()
            asked = select(*self._shown).join(these, these.c[0] == self._key).order_by(*in_order)
            rows = connection.execute(asked).all()
            yield from filter(query.matches, filter(None, map(self._decoded, rows)))
            if len(rows) < chunk:
                return

    def _between(self, from_us: int | None, until_us: int | None) -> list[ColumnElement[bool]]:
        conditions = [self._mine, self._due_us.is_not(None)]
        if from_us is not None:
            conditions.append(self._due_us >= from_us)
        if until_us is not None:
            conditions.append(self._due_us < until_us)
        return conditions
