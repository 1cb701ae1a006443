"""Looking at what waits in a table: by due time, by task id, by what stands in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Table, func, select

from .interface import T
from .tasks import RecordedTasks, Republishes
from .waiting import ALL, Page, Query, Waiting

#: Rows that a search reads at a time.
_CHUNK = 1000


@dataclass(frozen=True)
class DueRows:
    """The rows of one owner in a table of messages by due time: which columns say what."""

    table: Table
    mine: ColumnElement[bool]
    due_us: Column[Any]
    #: The order of rows that are due together.
    order: tuple[Column[Any], ...]
    #: The text that is searched.
    text: Column[Any]
    #: The columns to read of a row.
    shown: tuple[Column[Any], ...]

    def count(self, connection: Connection, from_us: int | None, until_us: int | None) -> int:
        """Number of those due from then until before then; None is without limit."""
        asked = select(func.count()).select_from(self.table)
        return int(connection.execute(asked.where(*self._between(from_us, until_us))).scalar() or 0)

    def span(self, connection: Connection) -> tuple[int, int] | None:
        """Due times of the first and the last; None if nothing waits."""
        asked = select(func.min(self.due_us), func.max(self.due_us)).where(self.mine)
        first_us, last_us = connection.execute(asked).one()
        return None if first_us is None else (int(first_us), int(last_us))

    def waiting(
        self,
        connection: Connection,
        query: Query,
        *,
        offset: int = 0,
    ) -> Iterator[Any]:
        """Rows due in the range of *query*, earliest first, whose texts have what it looks for."""
        conditions = self._between(query.from_us, query.until_us)
        if query.needle:
            conditions.append(self.text.icontains(query.needle, autoescape=True))
        asked = select(*self.shown).where(*conditions).order_by(self.due_us, *self.order)
        for start in count(offset, _CHUNK):
            rows = connection.execute(asked.offset(start).limit(_CHUNK)).all()
            yield from rows
            if len(rows) < _CHUNK:
                return

    def _between(self, from_us: int | None, until_us: int | None) -> list[ColumnElement[bool]]:
        conditions = [self.mine, self.due_us.is_not(None)]
        if from_us is not None:
            conditions.append(self.due_us >= from_us)
        if until_us is not None:
            conditions.append(self.due_us < until_us)
        return conditions


class SqlTasks(RecordedTasks):
    """Waiting tasks that the index in a database lists."""

    def __init__(self, index: Any, rows: DueRows, republishes: Republishes) -> None:
        self.index = index
        self._delays = republishes
        self._entries = index.entries
        self._look_up: Callable[[Callable[[Connection], T]], T] = index.look_up
        self._rows = rows

    def count(self, query: Query = ALL) -> int:
        if query.is_by_time_only:
            return self._look_up(
                lambda found: self._rows.count(found, query.from_us, query.until_us)
            )
        return self._look_up(lambda found: sum(1 for _ in self._matching(found, query, 0)))

    def page(self, query: Query = ALL, *, offset: int = 0, limit: int = 50) -> Page:
        by_time = query.is_by_time_only

        def paged(connection: Connection) -> Page:
            matching = self._matching(connection, query, offset if by_time else 0)
            if not by_time:
                return Page(tuple(islice(matching, offset, offset + limit)), None)
            total = self._rows.count(connection, query.from_us, query.until_us)
            return Page(tuple(islice(matching, limit)), total)

        return self._look_up(paged)

    def get(self, task_id: str) -> list[Waiting]:
        return [task for _, _, task in self._found(task_id)]

    def counts(self, edges_us: Sequence[int]) -> list[int]:
        return self._look_up(
            lambda found: [self._rows.count(found, *pair) for pair in pairwise(edges_us)]
        )

    def span(self) -> tuple[int, int] | None:
        return self._look_up(self._rows.span)

    def _found(self, task_id: str) -> list[tuple[str, str, Waiting]]:
        found = []
        for member, entry, due_us in self._entries(task_id):
            task = self._delays.waiting(member, entry, due_us)
            if task is not None:
                found.append((member, entry, task))
        return found

    def _matching(self, connection: Connection, query: Query, offset: int) -> Iterator[Waiting]:
        for task_id, delivery_id, entry, due_us in self._rows.waiting(
            connection, query, offset=offset
        ):
            task = self._delays.waiting(f"{task_id}:{delivery_id}", entry, due_us)
            if task is not None and query.matches(task):
                yield task
