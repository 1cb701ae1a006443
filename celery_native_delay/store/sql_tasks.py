"""Lists, searches, cancels and reschedules the waiting tasks in a database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, delete, func, or_, select

from ..records.interface import T
from ..records.waiting import (
    Edit,
    Found,
    Query,
    Replacement,
    Waiting,
    WaitingTasks,
)
from .database import now_us
from .entry import changed_text, waiting_of
from .sql_table import CANCELLED, LISTED, TAKEN, TASKS, WAITING, short_id

_ROW = TASKS.c

#: Intervals that one query counts.
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

    def _count(self, from_us: int | None, until_us: int | None) -> int:
        asked = self._counted(from_us, until_us)
        return int(self._look_up(lambda connection: connection.execute(asked).scalar()) or 0)

    def _counted(self, from_us: int | None, until_us: int | None) -> Select[Any]:
        asked = select(func.count()).select_from(TASKS)
        return asked.where(*self._between(from_us, until_us))

    def _read(
        self, query: Query, after: Any, *, offset: int, limit: int
    ) -> tuple[list[Waiting], Any]:
        conditions = self._between(query.from_us, query.until_us)
        if query.needle:
            conditions.append(_ROW.entry.icontains(query.needle, autoescape=True))
        if after is not None:  # the first condition is for the index
            conditions.append(_ROW.next_us >= after.next_us)
            conditions.append(or_(_ROW.next_us > after.next_us, _ROW.id > after.id))
        in_order = _ROW.next_us, _ROW.id
        # The index alone finds the keys, however many rows are skipped.
        keys = select(_ROW.id).where(*conditions).order_by(*in_order)
        these = keys.offset(offset).limit(limit).subquery()
        asked = select(_ROW.entry, *in_order).join(these, these.c[0] == _ROW.id).order_by(*in_order)
        rows = self._look_up(lambda connection: connection.execute(asked).all())
        tasks = filter(None, (waiting_of(row.entry) for row in rows))
        return list(tasks), rows[-1] if len(rows) == limit else None

    def _between(self, from_us: int | None, until_us: int | None) -> list[ColumnElement[bool]]:
        conditions = [_ROW.namespace == self._store.namespace, _ROW.state == WAITING]
        if from_us is not None:
            conditions.append(_ROW.next_us >= from_us)
        if until_us is not None:
            conditions.append(_ROW.next_us < until_us)
        return conditions

    def _now_us(self) -> int:
        return self._look_up(now_us)

    def _of_tasks(self, task_ids: Collection[str], state: ColumnElement[bool]) -> Sequence[Any]:
        asked = select(_ROW.id, _ROW.task_id, _ROW.entry, _ROW.reason).where(
            _ROW.namespace == self._store.namespace,
            _ROW.task_id.in_(list(map(short_id, task_ids))),
            state,
        )
        in_order = asked.order_by(_ROW.next_us)
        return self._look_up(lambda connection: connection.execute(in_order).all())

    def _found(self, task_ids: Collection[str]) -> Iterator[Found]:
        wanted = set(task_ids)
        for row in self._of_tasks(wanted, LISTED):
            task = waiting_of(row.entry)
            if task is not None and task.id in wanted:
                task = replace(task, refusal=row.reason or "") if row.reason else task
                yield Found(task.id, row.id, row.entry, task)

    def taken(self, task_ids: Collection[str]) -> Collection[str]:
        taken = {row.task_id for row in self._of_tasks(task_ids, _ROW.state == TAKEN)}
        return [one for one in task_ids if short_id(one) in taken]

    def _changed(self, entry: str, due_us: int, edit: Edit | None, *, cancelled: bool) -> str:
        return changed_text(entry, due_us, edit, cancelled=cancelled)

    def _replace(self, new: Sequence[Replacement], *, cancelled: bool) -> Collection[int]:
        state, by_id = CANCELLED if cancelled else WAITING, {one.name: one for one in new}
        # In one order, else two such calls would be a deadlock.
        asked = select(*(each for each in _ROW if each.name != "id"), _ROW.id)
        asked = asked.where(_ROW.id.in_(list(by_id)), LISTED).order_by(_ROW.id).with_for_update()

        def replaced(connection: Connection) -> Collection[int]:
            written, removed = {}, []
            for row in connection.execute(asked).mappings():
                one = by_id[row["id"]]
                if row["entry"] != one.entry:
                    continue
                if not one.content:
                    removed.append(one.name)
                    continue
                values = {"state": state, "next_us": one.due_us, "refusals": 0, "reason": None}
                written[one.name] = {**row, **values, "entry": one.content}
            if removed:
                connection.execute(delete(TASKS).where(_ROW.id.in_(removed)))
            if written:
                connection.execute(self._store.upsert, list(written.values()))
            return [*written, *removed]

        done: Collection[int] = self._store.do_soon(replaced)
        if done:
            self._store.note_added(min(by_id[each].due_us for each in done))
        return done
