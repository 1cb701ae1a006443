"""Moving what waits to and from a store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from time import time_ns
from typing import Any

from ...keyed.records import KeyRecords
from ..moving import Found, Source
from ..virtual import moving
from ..virtual.wrapping import id_of
from .rows import Row
from .store import Store


class StoreMovingPart(moving.MovingPart):
    """A store's :class:`~celery_native_delay.transports.moving.MovingPart`."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        self._store: Store = channel.delays.store
        self.name = f"{self._store.namespace} of {self._store.shown_url}"

    def prepare(self, queues: Any) -> None:
        """Make the tables, if they are not there, and declare *queues*."""
        self._store.prepare()
        super().prepare(queues)

    def _has(self, message: dict[str, Any], queue: str) -> bool:
        due_us = self._channel.due_of(message)
        with self._store.rows() as rows:
            found = rows.of(id_of(message))
        return any((row.queue, row.due_us) == (queue, due_us) for row in found)

    def _source(self) -> Source:
        return StoreSource(self._store, self.name)


class StoreSource(Source):
    """All that waits in a store, earliest first."""

    keeps_keys = False

    def __init__(self, store: Store, name: str) -> None:
        self.name = name
        self._store = store
        self._last: Row | None = None

    def key_records(self) -> KeyRecords:
        return KeyRecords(self._store.records)

    def count(self) -> int:
        return self._store.census().waiting

    def found(self) -> Iterator[Found]:
        store, census = self._store, self._store.census()
        after, left = (0, 0), census.waiting
        while left > 0:
            with store.rows() as rows:
                chunk = rows.after(*after)
            if not chunk:
                return
            for row, was_moving in chunk[:left]:
                assert row.due_us is not None
                after = row.due_us, row.id
                left -= 1
                if census.promoting and row.due_us < time_ns() // 1000 + moving.LEFT_US:
                    yield moving.LEFT
                    continue
                with store.rows(to_change=True) as rows:
                    if not rows.mark_moving(row):
                        continue  # handed over meanwhile
                self._last = row
                found = moving.moving_of(row.envelope, queue=row.queue, due_us=row.due_us)
                yield replace(found, again=was_moving)

    def done(self) -> bool:
        assert self._last is not None
        with self._store.rows(to_change=True) as rows:
            return rows.remove_as_it_was(self._last)
