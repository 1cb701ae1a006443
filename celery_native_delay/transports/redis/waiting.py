"""List, cancel and reschedule the waiting tasks of a Redis broker.

A change fails if another process has changed the message first. A cancelled task becomes due at
once. The worker that receives the message does not run the task, but reports the task as revoked.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from ...due_time import eta_of, milliseconds_up
from ...errors import CannotDelay
from ...keyed.record import key_and_kind
from ...message import CANCELLED, HEADER
from ...records.waiting import HELD, Edit, Replacement, Waiting
from ...store.entry import NO_TASK
from ...store.redis_tasks import RedisTasks
from ..virtual.from_store import entry_of as entry_of_message
from ..virtual.from_store import message_of
from ..virtual.wrapping import delivery_id_of, encoded, unwrapped, wrapped
from .keys import entry_of, opened_entry
from .store import BATCH


class RedisWaitingTasks(RedisTasks):
    """Lists, cancels and reschedules the waiting tasks of a Redis broker."""

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
