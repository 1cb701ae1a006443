"""List, cancel and reschedule the waiting tasks of a Redis broker.

A change fails if another process has changed the message first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import time_ns
from typing import Any

from redis.exceptions import RedisError

from ...errors import StoreUnavailable
from ...records.redis_listing import RedisListing
from ...records.waiting import Outcome, Waiting
from ..virtual.waiting import changed, waiting_of
from .entry import entry_of, opened_entry
from .store import Store


class RedisWaitingTasks(RedisListing):
    """Lists, cancels and reschedules the waiting tasks of a Redis broker."""

    def __init__(self, channel: Any) -> None:
        self._delays = channel.delays
        self._delays.prepare()
        self._queue_of = channel.queue_of
        keys = self._delays.keys
        client = self._delays.own.client
        super().__init__(client, keys)

    def _change(self, task_id: str, due_us: int | None, *, cancelled: bool) -> Outcome:
        outcome = super()._change(task_id, due_us, cancelled=cancelled)
        if outcome and due_us is None:
            # Due messages are moved into their queues now, so that they are not listed as waiting.
            with self._explained():
                self._delays.own.promote(version=self._delays.version)
        return outcome

    def _replace(
        self,
        member: str,
        entry: bytes,
        task: Waiting,
        due_us: int | None,
        *,
        cancelled: bool,
        **_: int,
    ) -> tuple[str, int] | None:
        store: Store = self._delays.own
        destination, envelope = opened_entry(entry)
        new_due_us = time_ns() // 1000 if due_us is None else due_us
        new = changed(envelope, new_due_us, cancelled=cancelled)
        with self._explained():
            if new is None:
                return (member, 0) if store.remove(member, entry) else None
            changed_us = store.replace(member, entry, due_us, entry_of(destination, new))
        return None if changed_us is None else (member, changed_us)

    def _decoded(self, member: str, entry: bytes, due_us: int) -> Waiting | None:
        destination, envelope = opened_entry(entry)
        return waiting_of(envelope, queue=self._queue_of(destination, envelope), due_us=due_us)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RedisError as exc:
            raise StoreUnavailable(f"waiting tasks cannot be listed: {exc}") from exc
