"""Moving what waits to and from Redis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...keyed.records import KeyRecords
from ..moving import Found, Source
from ..virtual import moving
from .entry import opened_entry
from .keys import member_of
from .ledger import RedisLedger
from .store import Store

#: Members that are read at a time.
_CHUNK = 100

#: For so long it is known which message was being moved when a process died, in seconds.
_KNOWN_SECONDS = 30 * 86_400


class RedisMovingPart(moving.MovingPart):
    """Redis' :class:`~celery_native_delay.transports.moving.MovingPart`."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        self.name = channel.delays.keys.space

    def prepare(self, queues: Any) -> None:
        """Check the server, and declare *queues*."""
        self._channel.delays.prepare()
        super().prepare(queues)

    def _has(self, message: dict[str, Any], queue: str) -> bool:
        destination = self._channel.destination(queue, message)
        store: Store = self._channel.delays.store
        member = member_of(message, destination.keys[0])
        return store.client.zscore(store.keys.due, member) is not None

    def _source(self) -> Source:
        return RedisSource(self._channel)


class RedisSource(Source):
    """All that waits in Redis, earliest first."""

    keeps_keys = False

    def __init__(self, channel: Any) -> None:
        channel.delays.prepare()
        self._store: Store = channel.delays.store
        self._records: KeyRecords = channel.delays.records
        self._queue_of = RedisLedger(channel).queue_of
        self.name = self._store.keys.space
        self._last: tuple[str, bytes] | None = None

    def key_records(self) -> KeyRecords:
        return self._records

    def count(self) -> int:
        return self._store.census().waiting

    def found(self) -> Iterator[Found]:
        store, keys = self._store, self._store.keys
        census = store.census()
        left, stay, interrupted = census.waiting, 0, store.client.get(keys.moving)
        while left > 0 and (
            members := store.client.zrange(keys.due, stay, stay + min(left, _CHUNK) - 1)
        ):
            left -= len(members)
            for member in members:
                with store.client.pipeline() as pipeline:
                    pipeline.set(keys.moving, member, ex=_KNOWN_SECONDS)
                    pipeline.hget(keys.messages, member)
                    pipeline.zscore(keys.due, member)
                    _, entry, due_us = pipeline.execute()
                if entry is None or due_us is None:
                    stay += due_us is not None  # its entry is lost; else it was handed over
                    continue
                if census.promoting and due_us < store.now_us() + moving.LEFT_US:
                    stay += 1
                    yield moving.LEFT
                    continue
                self._last = member.decode(), entry
                destination, envelope = opened_entry(entry)
                queue = self._queue_of(destination)
                found = moving.moving_of(envelope, queue=queue, due_us=int(due_us))
                yield replace(found, again=member == interrupted)
                stay += self._last is not None
        store.client.delete(keys.moving)

    def done(self) -> bool:
        assert self._last is not None
        last, self._last = self._last, None
        return self._store.remove(*last)
