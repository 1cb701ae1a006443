"""The waiting tasks of a store, seen and changed in place.

A row's lock decides between a change and the dispatcher: the second finds it gone, or due at
another time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from time import time_ns
from typing import Any

from sqlalchemy import Connection

from ...errors import RecordsUnavailable, StoreUnavailable, TopologyMismatch
from ...records.interface import T
from ...records.sql_listing import SqlListing
from ...records.waiting import Outcome, Verdict, Waiting
from ..virtual.waiting import changed, waiting_of
from .handover import HandOver, handing_over
from .rows import SHOWN
from .schema import MESSAGES
from .store import Store


class StoreWaitingTasks(SqlListing):
    """A :class:`~celery_native_delay.records.waiting.WaitingTasks` on one channel."""

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

    def get(self, task_id: str) -> list[Waiting]:
        with _explained(), self._store.rows() as rows:
            return list(filter(None, map(self._decoded, rows.of(task_id))))

    def _look_up(self, work: Callable[[Connection], T]) -> T:
        with _explained():
            return self._store.look(work)

    def _decoded(self, row: Any) -> Waiting | None:
        return waiting_of(row.envelope, queue=row.queue, due_us=row.due_us)

    def _change(self, task_id: str, due_us: int | None, *, cancelled: bool) -> Outcome:
        new_due_us = time_ns() // 1000 if due_us is None else due_us
        done: list[Waiting] = []
        with _explained():
            seen = self.get(task_id)
            with self._store.rows(to_change=True) as rows:
                for row in rows.of(task_id):
                    task = self._decoded(row)
                    if task is None:
                        continue
                    done.append(task)
                    new = changed(row.envelope, new_due_us, cancelled=cancelled)
                    if new is None:
                        rows.remove(row)
                    else:
                        rows.replace(row, new, new_due_us)
            if not done:
                verdict = Verdict.TOO_LATE if seen else Verdict.UNKNOWN
                return Outcome(task_id, verdict, None, tuple(seen))
            self._store.on_add(new_due_us)
            if due_us is None:
                self._dispatch()
        return Outcome(task_id, Verdict.DONE, None if cancelled else new_due_us, tuple(done))

    def _dispatch(self) -> None:
        """Dispatch a batch: without a dispatcher what is due would be counted among what waits."""
        lost = self._channel.connection.client.connection_errors
        with suppress(OSError, *lost):  # then a worker will, when the broker is back
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
    except (StoreUnavailable, TopologyMismatch) as exc:
        raise RecordsUnavailable(f"the store does not say what waits: {exc}") from exc
