"""Move waiting messages to and from a Redis broker, for ``delay migrate``."""

from __future__ import annotations

from typing import Any

from ...store.interface import WaitingRow
from ..moving import Moving, Source
from ..virtual import moving
from ..virtual.moving import StoreSource
from .keys import member_of, opened_entry
from .store import RedisBrokerStore


class RedisMovingPart(moving.VirtualMovingPart):
    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        if channel.store is None:
            self.name = channel.delays.keys.space

    def prepare(self, queues: Any) -> None:
        self._channel.delays.prepare()
        super().prepare(queues)

    def _has(self, message: dict[str, Any], queue: str) -> bool:
        if self._channel.store is not None:
            return False
        destination = self._channel.destination(queue, message)
        store: RedisBrokerStore = self._channel.delays.own
        member = member_of(message, destination.keys[0])
        return store.client.zscore(store.keys.due, member) is not None

    def _source(self) -> Source:
        return RedisSource(self._channel)


class RedisSource(StoreSource):
    """Takes the waiting messages out of a Redis broker, earliest due time first."""

    def __init__(self, channel: Any) -> None:
        channel.delays.prepare()
        store: RedisBrokerStore = channel.delays.own
        super().__init__(store, store.keys.space)
        self._queue_of = channel.queue_of

    def _read(self, row: WaitingRow) -> tuple[str, Moving]:
        destination, envelope = opened_entry(row.entry.encode())
        queue = self._queue_of(destination, envelope)
        return row.key.decode(), moving.moving_of(envelope, queue=queue, due_us=row.next_us)
