"""List, cancel and reschedule the waiting tasks in a database.

Each transaction locks the message's row, so no other transaction can change the message meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from typing import Any

from sqlalchemy import Connection, delete, select, update

from ...errors import RecordsUnavailable, StoreUnavailable
from ...now import time_ns
from ...records.interface import T
from ...records.sql_listing import SqlListing
from ...records.waiting import Outcome, Waiting
from ..virtual.waiting import changed, waiting_of
from .handover import HandOver, handing_over
from .rows import SHOWN, as_it_was
from .schema import MESSAGES
from .store import Store


class StoreWaitingTasks(SqlListing):
    """Lists, cancels and reschedules the waiting tasks in a database."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._delays = channel.delays
        self._store: Store = self._delays.store
        self._stack = ExitStack()
        row = MESSAGES.c
        mine = row.namespace == self._store.namespace
        super().__init__(mine, row.due_us, (row.id,), row.envelope, SHOWN)
        with _explained():
            self._store.prepare()

    def close(self) -> None:
        self._stack.close()

    def _look_up(self, work: Callable[[Connection], T]) -> T:
        with _explained():
            return self._store.look_up(work)

    def _decoded(self, row: Any) -> Waiting | None:
        return waiting_of(row.envelope, queue=row.queue, due_us=row.due_us)

    def _found(self, task_id: str) -> list[tuple[int, Any, Waiting]]:
        row = MESSAGES.c
        asked = select(*SHOWN).where(self._mine, row.task_id == task_id[:255]).order_by(row.due_us)
        rows = self._look_up(lambda connection: connection.execute(asked).all())
        return [(row.id, row, task) for row in rows if (task := self._decoded(row)) is not None]

    def _replace(
        self,
        member: int,
        entry: Any,
        task: Waiting,
        due_us: int | None,
        *,
        cancelled: bool,
        **_: int,
    ) -> tuple[int, int] | None:
        new_due_us = time_ns() // 1000 if due_us is None else due_us
        new = changed(entry.envelope, new_due_us, cancelled=cancelled)
        statement: Any = delete(MESSAGES)
        if new is not None:
            values = {"envelope": new, "due_us": new_due_us, "attempts": 0, "reason": None}
            statement = update(MESSAGES).values(values)
        this = statement.where(*as_it_was(entry))
        with _explained():
            done = self._store.do(lambda connection: connection.execute(this).rowcount)
        return (member, new_due_us) if done else None

    def _change(self, task_id: str, due_us: int | None, *, cancelled: bool) -> Outcome:
        outcome = super()._change(task_id, due_us, cancelled=cancelled)
        if outcome and due_us is None:
            with _explained():
                self._dispatch()
        elif outcome:
            self._store.on_add(due_us or 0)
        return outcome

    def _dispatch(self) -> None:
        """Move one batch of due messages to their queues now, without a worker."""
        lost = self._channel.connection.client.connection_errors
        with suppress(OSError, *lost):  # a worker does it when the broker is back
            hand_over = self._hand_over
            with self._store.taking(until_us=time_ns() // 1000) as batch:
                hand_over(batch, park=False)

    @cached_property
    def _hand_over(self) -> HandOver:
        return self._stack.enter_context(handing_over(self._channel, self._store))


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except StoreUnavailable as exc:
        raise RecordsUnavailable(f"waiting tasks cannot be listed: {exc}") from exc
