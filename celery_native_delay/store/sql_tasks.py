"""Lists, searches, cancels and reschedules the waiting tasks in a database."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice, pairwise
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, delete, func, select, update

from ..records.database import now_us
from ..records.interface import T
from ..records.waiting import ALL, Edit, Query, Waiting, WaitingPage, WaitingTasks
from .entry import StoreEntry, waiting_of
from .sql_table import CANCELLED, LISTED, TAKEN, TASKS, WAITING, short_id

_ROW = TASKS.c

#: Rows that one query of a search reads, and intervals that one query counts.
_CHUNK = 1000
_COUNTS = 100


class SqlTasks(WaitingTasks):
    """Lists, searches, cancels and reschedules the waiting tasks in a database."""

    def __init__(self, store: Any, delays: Any) -> None:
        """*store* is an ``SqlStore``."""
        self._store = store
        self._delays = delays

    def _look_up(self, work: Callable[[Connection], T]) -> T:
        found: T = self._store.look_up(work)
        return found

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
        asked = select(func.min(_ROW.next_us), func.max(_ROW.next_us)).where(
            *self._between(None, None)
        )
        first_us, last_us = self._look_up(lambda connection: connection.execute(asked).one())
        return None if first_us is None else (int(first_us), int(last_us))

    def _count(self, connection: Connection, from_us: int | None, until_us: int | None) -> int:
        return int(connection.execute(self._counted(from_us, until_us)).scalar() or 0)

    def _counted(self, from_us: int | None, until_us: int | None) -> Select[Any]:
        asked = select(func.count()).select_from(TASKS)
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
            conditions.append(_ROW.entry.icontains(query.needle, autoescape=True))
        in_order = _ROW.next_us, _ROW.id
        # The index alone finds the keys, however many rows are skipped.
        keys = select(_ROW.id).where(*conditions).order_by(*in_order)
        for start in count(offset, chunk):
            these = keys.offset(start).limit(chunk).subquery()
            asked = select(_ROW.entry).join(these, these.c[0] == _ROW.id).order_by(*in_order)
            rows = connection.execute(asked).all()
            yield from filter(query.matches, filter(None, (waiting_of(row.entry) for row in rows)))
            if len(rows) < chunk:
                return

    def _between(self, from_us: int | None, until_us: int | None) -> list[ColumnElement[bool]]:
        conditions = [_ROW.namespace == self._store.namespace, _ROW.state == WAITING]
        if from_us is not None:
            conditions.append(_ROW.next_us >= from_us)
        if until_us is not None:
            conditions.append(_ROW.next_us < until_us)
        return conditions

    def _of_task(self, task_id: str) -> Any:
        of_task = _ROW.task_id == short_id(task_id)
        return select(_ROW.id, _ROW.entry, _ROW.reason).where(
            _ROW.namespace == self._store.namespace, of_task
        )

    def _found(self, task_id: str) -> list[tuple[int, str, Waiting]]:
        asked = self._of_task(task_id).where(LISTED).order_by(_ROW.next_us)
        rows = self._look_up(lambda connection: connection.execute(asked).all())
        found = ((row, waiting_of(row.entry)) for row in rows)
        return [
            (row.id, row.entry, replace(task, refusal=row.reason or ""))
            for row, task in found
            if task is not None and task.id == task_id
        ]

    def _replace(
        self,
        member: int,
        entry: str,
        due_us: int | None,
        *,
        cancelled: bool,
        edit: Edit | None = None,
    ) -> tuple[int, int] | None:
        before = StoreEntry.decoded(entry).edited(edit)

        def replaced(connection: Connection) -> int | None:
            new_us = now_us(connection) if due_us is None else due_us
            new = before.changed(new_us, cancelled=cancelled)
            this: Any = delete(TASKS)
            if new is not None:
                state = CANCELLED if cancelled else WAITING
                values = {"state": state, "next_us": new_us, "refusals": 0, "reason": None}
                this = update(TASKS).values(values | {"entry": new.encoded()})
            as_it_was = (_ROW.id == member, LISTED, _ROW.entry == entry)
            return new_us if connection.execute(this.where(*as_it_was)).rowcount else None

        new_us = self._store.do_soon(replaced)
        if new_us is None:
            return None
        self._store.note_added(new_us)
        return member, new_us

    def is_taken(self, task_id: str) -> bool:
        taken = self._of_task(task_id).where(_ROW.state == TAKEN)
        return self._look_up(lambda connection: connection.execute(taken).first()) is not None
