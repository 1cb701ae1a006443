"""Store task state, such as debounce keys, in the database of waiting messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, delete, insert, select

from ...errors import RecordsUnavailable, StoreUnavailable
from ...records.interface import Change, Decide, Publish, RecordName, Snapshot, T
from ...records.sql import SqlRecords
from .schema import MESSAGES

_ROW = MESSAGES.c
_SEE = select(_ROW.id, _ROW.due_us).where(
    _ROW.namespace == bindparam("mine"), _ROW.task_id == bindparam("task")
)
_TAKE_OUT = delete(MESSAGES).where(_ROW.id == bindparam("one"))


class StoreRecords(SqlRecords):
    """Changes a task's stored state and waiting message in one database transaction."""

    has_marks = False

    def __init__(self, store: Any) -> None:
        super().__init__(store.url, store.namespace, engine=store.engine)
        self._store = store

    def change(self, name: RecordName, decide: Decide[T], publish: Publish | None = None) -> T:
        if publish is None:
            return super().change(name, decide)
        due_us: int | None = None

        def decide_and_note(snapshot: Snapshot) -> Change[T]:
            nonlocal due_us
            change = decide(snapshot)
            due_us = change.due_us
            return change

        try:
            answer = super().change(name, decide_and_note, publish)
        except RecordsUnavailable as error:  # for the caller it is a publish that failed
            raise StoreUnavailable(str(error)) from error
        if due_us is not None:
            self._store.on_add(due_us)
        return answer

    def clear(self) -> int:
        mine = delete(MESSAGES).where(_ROW.namespace == self._store.namespace)
        return int(self.do(lambda found: found.execute(mine).rowcount)) + super().clear()

    def make_tables(self) -> None:
        self._store.make_tables()
        super().make_tables()

    def _messages(
        self, connection: Connection, task_id: str, *, locked: bool
    ) -> tuple[tuple[Any, int], ...]:
        mine = {"mine": self._store.namespace, "task": task_id[:255]}
        rows = connection.execute(_SEE.with_for_update() if locked else _SEE, mine)
        return tuple((row_id, due_us or 0) for row_id, due_us in rows)

    def _cancel(self, connection: Connection, members: Sequence[Any]) -> None:
        for row_id in members:
            connection.execute(_TAKE_OUT, {"one": row_id})

    def _publish(self, connection: Connection, due_us: int, publish: Publish | None) -> None:
        assert publish is not None
        queue, due_us, task_id, envelope = publish(due_us, "", 0)
        row = self._store.row(queue, envelope, due_us, task_id)
        connection.execute(insert(MESSAGES), row)
