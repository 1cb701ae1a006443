"""Move waiting messages to and from a Redis broker, for ``delay migrate``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from time import time_ns
from typing import Any

from ...errors import InvalidDueTime
from ...message import due_of
from ...store.interface import WaitingRow
from ..moving import Found, Moving, Reach, Source, Stays
from ..virtual import moving
from ..virtual.moving import StoreSource
from .keys import member_of, opened_entry
from .store import RedisBrokerStore

#: How many messages are read at a time.
_CHUNK = 100


class RedisMovingPart(moving.VirtualMovingPart):
    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        if channel.store is None:
            self.name = channel.delays.keys.space

    def prepare(self, queues: Any) -> None:
        self._channel.delays.prepare()
        super().prepare(queues)

    def sources(self, what: str | None, reaches: Sequence[Reach]) -> list[Source]:
        """Return the waiting messages, and the tasks that ``delay migrate`` cannot move.

        These tasks have a future ETA, but are in a normal queue or unacknowledged. ``delay
        migrate`` reports only their number and the reason.
        """
        return [*super().sources(what, reaches), *held_by_queues(self._channel, reaches)]

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


class PlainSource(Source):
    """Reports the number of tasks that ``delay migrate`` cannot move, and the reason."""

    def __init__(self, name: str, count: int, why: str) -> None:
        self.name = name
        self._count = count
        self._why = why

    def count(self) -> int:
        return self._count

    def found(self) -> Iterator[Found]:
        for _ in range(self._count):
            yield Stays(self._why)

    def done(self) -> bool:
        raise AssertionError("all of them stay")


def held_by_queues(channel: Any, reaches: Sequence[Reach]) -> Iterator[PlainSource]:
    """Find tasks with a future ETA, in normal queues and among unacknowledged messages."""
    store: RedisBrokerStore = channel.delays.own
    prefix, client = store.keys.prefix, store.client
    way_out = "let an installed worker consume its queue, which puts it into the store"
    queues = {reach.queue for reach in reaches}
    # A queue of task_routes or `worker -Q` need not be in the app's task_queues.
    for bindings in client.scan_iter(f"{prefix}{channel.keyprefix_queue % '*'}", count=1000):
        bound = client.smembers(bindings)
        queues |= {_bound_queue(each.decode(), channel.sep) for each in bound}
    for queue in sorted(queues):
        steps = (channel._q_for_pri(queue, step) for step in channel.priority_steps)
        envelopes = (each for step in steps for each in _listed(client, f"{prefix}{step}"))
        if count := _with_eta_ahead(envelopes):
            yield PlainSource(
                queue, count, f"it has an ETA and lies in an ordinary queue: {way_out}"
            )
    held = (value for _, value in client.hscan_iter(f"{prefix}{channel.unacked_key}"))
    if count := _with_eta_ahead(held):
        why = f"it has an ETA and a plain worker holds it: stop that worker, then {way_out}"
        yield PlainSource(channel.unacked_key, count, why)


def _bound_queue(binding: str, sep: str) -> str:
    """Return the queue of kombu's *binding*: routing key, pattern and queue, joined by *sep*."""
    # Only a topic exchange has a pattern. The name of the queue may contain *sep*, too.
    _, empty_pattern, queue = binding.partition(sep * 2)
    return queue if empty_pattern else binding.rpartition(sep)[2]


def _listed(client: Any, key: str) -> Iterator[bytes]:
    at = 0
    while chunk := client.lrange(key, at, at + _CHUNK - 1):
        yield from chunk
        at += _CHUNK


def _with_eta_ahead(envelopes: Iterable[bytes]) -> int:
    now_us, count = time_ns() // 1000, 0
    for envelope in envelopes:
        try:
            message = json.loads(envelope)
            # For unacknowledged messages kombu keeps a list: the message and its origin.
            headers = (message[0] if isinstance(message, list) else message).get("headers")
            count += (due_of(headers) or 0) > now_us
        except (AttributeError, IndexError, InvalidDueTime, TypeError, ValueError):
            continue  # no valid task
    return count
