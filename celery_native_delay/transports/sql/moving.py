"""Move waiting messages to and from a database, for ``delay migrate``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from time import time_ns
from typing import Any

from sqlalchemy import delete, select, update

from ...keyed.records import KeyRecords
from ..moving import Found, Source
from ..virtual import moving
from ..virtual.wrapping import id_of
from .rows import MOVING, as_it_was, behind
from .schema import MESSAGES
from .store import Store


class StoreMovingPart(moving.MovingPart):
    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        self._store: Store = channel.delays.store
        self.name = f"{self._store.namespace} of {self._store.where}"

    def prepare(self, queues: Any) -> None:
        self._store.prepare()
        super().prepare(queues)

    def _has(self, message: dict[str, Any], queue: str) -> bool:
        row = MESSAGES.c
        this = select(row.queue).where(
            row.namespace == self._store.namespace,
            row.task_id == id_of(message)[:255],
            row.due_us == self._channel.due_of(message),
        )
        return queue in self._store.look_up(lambda found: found.execute(this).scalars().all())

    def _source(self) -> Source:
        return StoreSource(self._store, self.name)


class StoreSource(Source):
    """Takes the waiting messages out of a database, earliest due time first."""

    keeps_keys = False

    def __init__(self, store: Store, name: str) -> None:
        self.name = name
        self._store = store
        self._last: Any = None

    def key_records(self) -> KeyRecords:
        return KeyRecords(self._store.records)

    def count(self) -> int:
        return self._store.census().waiting

    def found(self) -> Iterator[Found]:
        store, census = self._store, self._store.census()
        after, left = (0, 0), census.waiting
        while left > 0:
            following = behind(store.namespace, *after)
            with store.explained(), store.engine.connect() as connection:
                chunk = connection.execute(following).all()
            if not chunk:
                return
            for row in chunk[:left]:
                after = row.due_us, row.id
                left -= 1
                if census.promoting and row.due_us < time_ns() // 1000 + moving.LEFT_US:
                    yield moving.LEFT
                    continue
                if not self._do(update(MESSAGES).where(*as_it_was(row)).values(reason=MOVING)):
                    continue  # it was delivered meanwhile
                self._last = row
                found = moving.moving_of(row.envelope, queue=row.queue, due_us=row.due_us)
                yield replace(found, again=row.reason == MOVING)

    def done(self) -> bool:
        return self._do(delete(MESSAGES).where(*as_it_was(self._last)))

    def _do(self, statement: Any) -> bool:
        """Execute the SQL *statement*; return True if a row matched."""
        return bool(self._store.do(lambda found: found.execute(statement).rowcount))
