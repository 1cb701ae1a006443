"""List, cancel and reschedule the waiting tasks of a Redis broker.

A change fails if another process has changed the message first. A cancelled task becomes due at
once. The worker that receives the message does not run the task, but reports the task as revoked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from time import time_ns
from typing import Any

from redis.exceptions import RedisError

from ...due_time import eta_of, milliseconds_up
from ...errors import CannotDelay, StoreUnavailable
from ...keyed.record import key_and_kind
from ...message import CANCELLED, HEADER
from ...records.redis_listing import RedisListing
from ...records.waiting import DueTime, Edit, Outcome, Waiting
from ..virtual.from_store import entry_of as entry_of_message
from ..virtual.from_store import message_of
from ..virtual.wrapping import delivery_id_of, encoded, unwrapped, wrapped
from .entry import entry_of, opened_entry
from .store import RedisBrokerStore


class RedisWaitingTasks(RedisListing):
    """Lists, cancels and reschedules the waiting tasks of a Redis broker."""

    def __init__(self, channel: Any) -> None:
        self._delays = channel.delays
        self._delays.prepare()
        self._queue_of, self._destination = channel.queue_of, channel.destination
        keys = self._delays.keys
        client = self._delays.own.client
        super().__init__(client, keys)

    def _change(
        self,
        task_id: str,
        due_us: int | DueTime | None,
        *,
        cancelled: bool,
        edit: Edit | None = None,
    ) -> Outcome:
        outcome = super()._change(task_id, due_us, cancelled=cancelled, edit=edit)
        if outcome and due_us is None:
            # Due messages are moved into their queues now, so that they are not listed as waiting.
            with self._explained():
                self._delays.own.promote(version=self._delays.version)
        return outcome

    def _replace(
        self,
        member: str,
        entry: bytes,
        due_us: int | None,
        *,
        cancelled: bool,
        edit: Edit | None = None,
    ) -> tuple[str, int] | None:
        store: RedisBrokerStore = self._delays.own
        destination, envelope = opened_entry(entry)
        new_due_us = time_ns() // 1000 if due_us is None else due_us
        if edit is not None:
            queue = self._queue_of(destination, envelope) or None
            edited = edit(entry_of_message(json.loads(envelope), queue, due_us=new_due_us))
            message = message_of(edited)
            envelope = encoded(message).encode()
            if edited.queue is not None:
                destination = self._destination(edited.queue, message)
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


def waiting_of(envelope: str | bytes, *, queue: str, due_us: int) -> Waiting | None:
    """Decode a waiting task from kombu's JSON *envelope*; return None for cancelled tasks."""
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
        queue=queue,
        exchange=info.get("exchange") or "",
        routing_key=info.get("routing_key") or "",
        due_us=due_us,
        delivery_id=delivery_id_of(header, properties),
        key=key,
        kind=kind,
    )


def changed(envelope: str | bytes, due_us: int, *, cancelled: bool) -> str | None:
    """Copy a waiting message with a new ETA; mark the copy as cancelled if *cancelled* is True.

    Only tasks of protocol 2 can be changed. For any other message, the function returns None if
    *cancelled* is True (the caller deletes the message), and raises CannotDelay if it is False.
    """
    message = json.loads(envelope)
    headers = dict(message.get("headers") or {})
    if "task" not in headers:
        if cancelled:  # its consumer does not know the mark, and there is no result
            return None
        raise CannotDelay(
            "expected a task of protocol 2, whose ETA is in its headers: only such can be "
            "rescheduled, others can be cancelled"
        )
    headers["eta"] = eta_of(due_us)
    moved = {**message, "headers": headers}
    return encoded(wrapped(moved, due_ms=milliseconds_up(due_us), cancelled=cancelled))
