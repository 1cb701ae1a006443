"""The waiting tasks of a store, seen and changed in place.

A row's lock decides between a change and the dispatcher: the second finds it gone, or due at
another time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from itertools import islice, pairwise
from time import time_ns
from typing import Any

from ...errors import RecordsUnavailable, StoreUnavailable, TopologyMismatch
from ...records.waiting import ALL, Outcome, Page, Query, Verdict, Waiting, WaitingTasks
from ..virtual.waiting import changed, waiting_of
from .handover import HandOver, handing_over
from .rows import Row
from .store import Store


class StoreWaitingTasks(WaitingTasks):
    """A :class:`~celery_native_delay.records.waiting.WaitingTasks` on one channel."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._delays = channel.delays
        self._store: Store = self._delays.store
        self._stack = ExitStack()
        with _explained():
            self._store.prepare()

    def close(self) -> None:
        self._stack.close()

    def count(self, query: Query = ALL) -> int:
        if not query.is_by_time_only:
            return sum(1 for _ in self._matching(query))
        with _explained(), self._store.rows() as rows:
            return rows.count(query.from_us, query.until_us)

    def page(self, query: Query = ALL, *, offset: int = 0, limit: int = 50) -> Page:
        if not query.is_by_time_only:
            return Page(tuple(islice(self._matching(query), offset, offset + limit)), None)
        with _explained(), self._store.rows() as rows:
            total = rows.count(query.from_us, query.until_us)
            found = rows.waiting(query.from_us, query.until_us, offset=offset)
            tasks = tuple(islice(filter(None, map(_decoded, found)), limit))
        return Page(tasks, total)

    def get(self, task_id: str) -> list[Waiting]:
        with _explained(), self._store.rows() as rows:
            return list(filter(None, map(_decoded, rows.of(task_id))))

    def counts(self, edges_us: Sequence[int]) -> list[int]:
        with _explained(), self._store.rows() as rows:
            return [rows.count(*pair) for pair in pairwise(edges_us)]

    def span(self) -> tuple[int, int] | None:
        with _explained(), self._store.rows() as rows:
            return rows.span()

    def _matching(self, query: Query) -> Iterator[Waiting]:
        with _explained(), self._store.rows() as rows:
            for row in rows.waiting(query.from_us, query.until_us, containing=query.needle):
                task = _decoded(row)
                if task is not None and query.matches(task):
                    yield task

    def _change(self, task_id: str, due_us: int | None, *, cancelled: bool) -> Outcome:
        new_due_us = time_ns() // 1000 if due_us is None else due_us
        done: list[Waiting] = []
        with _explained():
            seen = self.get(task_id)
            with self._store.rows(to_change=True) as rows:
                for row in rows.of(task_id):
                    task = _decoded(row)
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


def _decoded(row: Row) -> Waiting | None:
    return waiting_of(row.envelope, queue=row.queue, due_us=row.due_us)
