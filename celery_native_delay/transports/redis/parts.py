"""Serve workers and the ``delay`` commands on Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from ...due_time import eta_of, milliseconds_up
from ...errors import CannotDelay
from ...finding import WRONG, Finding
from ...keyed.record import key_and_kind
from ...keyed.records import keep_key
from ...message import CANCELLED, HEADER
from ...now import time_ns
from ...records.waiting import HELD, Edit, Replacement, Waiting
from ...redis_server import clocks
from ...store.entry import NO_TASK
from ...store.interface import WaitingRow
from ...store.redis_tasks import RedisTasks
from ..interface import AdminPart, Backlog, ParkedTask, Rescue, Told, Wait, WorkerPart
from ..moving import Moving, Source
from ..status import Status, refuse_waiting
from ..virtual import moving
from ..virtual.from_store import entry_of as entry_of_message
from ..virtual.from_store import message_of
from ..virtual.moving import StoreSource
from ..virtual.wrapping import delivery_id_of, encoded, unwrapped, wrapped
from .keys import entry_of, member_of, opened_entry
from .promoter import RedisPromoter
from .store import BATCH, RedisBrokerStore

#: How many scripts one rescue runs at most, so that a destination that always rejects costs little.
_ROUND = 100


class RedisWorkerPart(WorkerPart):
    def prepare(self, where: str) -> str:
        server = self._delays.prepare()
        census = self._delays.own.census()
        return (
            f"{where} ({server}) holds delayed tasks under {self._delays.keys.space}: "
            f"{census.waiting} waiting, {census.parked} parked; promoting in this worker; "
            f"{self.terms}"
        )

    def dangers(self) -> list[Finding]:
        """Find Redis settings that can lose messages, and a wrong clock of Redis or this worker."""
        return [*self._delays.dangers(), *clocks(self._delays.clock_ahead_seconds())]

    def put_one_back(self, wait: Wait) -> None:
        message = wait.on(wait.message._raw)
        destination = self._channel.destination(wait.queue, message)
        self._delays.put_back(message, destination, due_us=wait.due_us)
        now_us = time_ns() // 1000
        keep_key(self._delays.records, message["headers"], due_us=wait.due_us, now_us=now_us)

    def rescue(self) -> Rescue:
        return rescue(self._delays)

    def promoter(self, connect: Callable[..., Any]) -> RedisPromoter:
        return RedisPromoter(connect)


def rescue(delays: Any) -> Rescue:
    """Try again to deliver due but undeliverable messages; return the counts."""
    store: RedisBrokerStore = delays.own
    outcome = Rescue()
    before_us = store.now_us()
    for _ in range(_ROUND):
        handed = store.rescue(before_us=before_us)
        outcome.delivered += handed.delivered
        outcome.still_parked += handed.parked
        if handed.taken < BATCH:
            break
    return outcome


class RedisAdminPart(AdminPart):
    def __init__(self, channel: Any) -> None:
        self._delays = channel.delays
        self._store: RedisBrokerStore = self._delays.own
        self.name = self._delays.keys.space
        self.parking = self._delays.keys.parked

    def declare(self, queues: Sequence[Any]) -> Told:
        """Check the Redis server; there is nothing to create."""
        server = str(self._delays.prepare())
        sentence = f"{self.name}: nothing to declare, {server} can hold delayed messages"
        return Told({"name": self.name, "server": server}, [sentence])

    def examine(self) -> Iterator[Finding]:
        self._delays.prepare()
        yield from self._delays.dangers()
        census, surplus = self._store.census_and_surplus()
        yield from _compare(self.name, surplus)
        yield from Status.of(self.name, census).findings()
        yield from clocks(self._delays.clock_ahead_seconds())

    def status(self) -> Told:
        return Status.of(self.name, self._store.census()).told()

    def backlog(self) -> Backlog:
        census = self._store.census()
        waiting = census.waiting
        return Backlog(waiting, census.parked, (), True, census.until_first_us, waiting)

    def purge(self) -> int:
        return self._store.purge(parked=False)

    def uninstall(self) -> list[str]:
        refuse_waiting(self.name, self._store.census())
        return [f"{self._delays.records.clear()} key(s) {self.name}.*"]

    def parked(self, *, limit: int) -> tuple[int, list[ParkedTask]]:
        found = self._store.parked_entries(limit)
        messages = [json.loads(opened_entry(entry.encode())[1]) for entry, _ in found]
        tasks = [ParkedTask.of(*unwrapped(m.get("headers"), m["properties"])) for m in messages]
        return self._store.census().parked, tasks

    def requeue(self) -> Rescue:
        return rescue(self._delays)

    def purge_parked(self) -> int:
        return self._store.purge(parked=True)


def _compare(name: str, surplus: int) -> list[Finding]:
    if not surplus:
        return []
    what = "without a due time" if surplus > 0 else "lost"
    problem = f"{name}: {abs(surplus)} message(s) {what}"
    way_out = "find out who else writes to these keys, or drops them; send such tasks again"
    return [Finding("keys", WRONG, problem, way_out)]


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


class RedisWaitingTasks(RedisTasks):
    """Lists, cancels and reschedules the waiting tasks of a Redis broker.

    A change fails if another process has changed the message first. A cancelled task becomes due at
    once. The worker that receives the message does not run the task, but reports it as revoked.
    """

    lists_cancelled = True

    def __init__(self, channel: Any) -> None:
        channel.delays.prepare()
        self._queue_of, self._destination = channel.queue_of, channel.destination
        super().__init__(channel.delays.own, channel.delays)

    def _replace(self, new: Sequence[Replacement], *, cancelled: bool) -> Collection[str]:
        done = super()._replace(new, cancelled=cancelled)
        now_us = self._now_us()
        due = sum(one.due_us <= now_us for one in new)
        with self._explained():
            # Due messages are moved into their queues now, so that they are not listed as waiting.
            for _ in range(0, due, BATCH):
                self._rows.promote()
        return done

    def _changed(self, entry: bytes, due_us: int, edit: Edit | None, *, cancelled: bool) -> str:
        destination, envelope = opened_entry(entry)
        message = json.loads(envelope)
        if edit is not None:
            queue = self._queue_of(destination, envelope) or None
            edited = edit(entry_of_message(message, queue, due_us=due_us))
            message = message_of(edited)
            if edited.queue is not None:
                destination = self._destination(edited.queue, message)
        headers = dict(message.get("headers") or {})
        if "task" in headers:
            if (headers.get(HEADER) or {}).get("due") != milliseconds_up(due_us):
                headers.pop(HELD, None)
            moved = {**message, "headers": {**headers, "eta": eta_of(due_us)}}
            new = wrapped(moved, due_ms=milliseconds_up(due_us), cancelled=cancelled)
            return entry_of(destination, encoded(new))
        if cancelled:  # its consumer does not know the mark, and there is no result
            return ""
        raise CannotDelay(NO_TASK)

    def _decoded(self, entry: bytes, due_us: int) -> Waiting | None:
        destination, envelope = opened_entry(entry)
        message = json.loads(envelope)
        headers, properties = message.get("headers") or {}, message["properties"]
        header = headers.get(HEADER) or {}
        if header.get(CANCELLED):
            return None
        info = properties.get("delivery_info") or {}
        opened, _ = unwrapped(headers, properties)
        key, kind = key_and_kind(opened)
        return Waiting.of(
            opened,
            properties,
            queue=self._queue_of(destination, envelope),
            exchange=info.get("exchange") or "",
            routing_key=info.get("routing_key") or "",
            due_us=due_us,
            delivery_id=delivery_id_of(header, properties),
            key=key,
            kind=kind,
        )
