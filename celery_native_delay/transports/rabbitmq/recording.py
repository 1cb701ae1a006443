"""Noting down in the records what is about to wait."""

from __future__ import annotations

from typing import Any

import amqp

from ...message import HEADER, Delayed
from ...records.interface import Index, IndexEntry
from ...records.waiting import Waiting
from ..recorded import member_of
from .entry import Entry, due_then, waiting


class Recorder:
    """Tells the records what one connection sends. Never fails, hardly ever waits."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def record(self, message: amqp.Message, wrapped: amqp.Message, delayed: Delayed) -> None:
        """Note down what is about to be sent: a worker may have it soon."""
        header = wrapped.properties["application_headers"][HEADER]
        headers = message.properties.get("application_headers") or {}
        member = member_of(headers, delayed.delivery_id)
        if member is None:
            return
        body = message.body
        entry = Entry(
            message.properties,
            body.encode() if isinstance(body, str) else bytes(body),
            delayed.exchange,
            delayed.routing_key,
            delayed.queue,
            header.get("expires"),
        )
        self.note(member, delayed.due_us, entry)

    def note(self, member: str, due_us: int, entry: Entry) -> None:
        """Note down an entry."""
        self._index.note(IndexEntry(member, due_us, entry.encoded()))

    def forget(self, message: amqp.Message, delivery_id: str) -> None:
        """Strike what the broker did not take."""
        headers = message.properties.get("application_headers") or {}
        member = member_of(headers, delivery_id)
        if member is not None:
            self._index.forget(member)


class Republisher:
    """Reads entries of the records, and publishes their messages again, on one connection."""

    def __init__(self, delays: Any) -> None:
        self._delays = delays

    def waiting(self, member: str, entry: str, due_us: int) -> Waiting:
        return waiting(member, entry, due_us)

    def publish_again(self, entry: str, due_us: int, delivery_id: str, *, cancelled: bool) -> str:
        moved = due_then(Entry.decoded(entry), due_us)
        self._delays.put_back(
            amqp.Message(moved.body, **moved.properties),
            moved.wait(delivery_id, due_us, cancelled=cancelled),
            recorded=False,
        )
        return moved.encoded()

    def check_reach(self, due_us: int) -> None:
        self._delays.check_reach(due_us)
