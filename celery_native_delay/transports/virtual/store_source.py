"""Reads the waiting tasks of a store, for ``delay migrate``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kombu.utils.json import dumps

from ...keyed.records import KeyRecords
from ...message import Delayed
from ...records.interface import Change, RecordName, Snapshot
from ...store.entry import StoreEntry
from ...store.interface import WaitingRow
from ..moving import Found, Moving, Source
from .from_store import message_of
from .moving import LEFT, LEFT_US, moving_of

#: Rows that one query reads.
_AT_ONCE = 500

#: The state that names the row which is being moved, and for how long it is kept, in microseconds.
#: If a move is killed, the next one knows that the destination may have this row's message.
_MOVING = RecordName("lease", "moving")
_KEPT_US = 30 * 86_400_000_000


class StoreSource(Source):
    """Takes the waiting tasks out of a store, earliest due time first."""

    keeps_keys = False

    def __init__(self, store: Any, name: str = "") -> None:
        """*store* is a ``Store``, or the waiting messages of a Redis broker."""
        self.name = name or f"{store.where} ({store.namespace})"
        self._store = store
        self._last: tuple[object, str] | None = None
        self._is_moving = False

    def key_records(self) -> KeyRecords:
        return KeyRecords(self._store.state)

    def count(self) -> int:
        waiting: int = self._store.census().waiting
        return waiting

    def found(self) -> Iterator[Found]:
        store, census = self._store, self._store.census()
        interrupted = store.state.read(_MOVING).text
        after, left = None, census.waiting
        while left > 0:
            rows = store.rows_after(after, limit=min(_AT_ONCE, left))
            if not rows:
                return
            now_us = store.now_us()
            for row in rows:
                after, left = row, left - 1
                if census.promoting and row.next_us < now_us + LEFT_US:
                    yield LEFT
                    continue
                self._last = row.key, row.entry
                name, moving = self._read(row)
                self._note(name)
                yield replace(moving, again=name == interrupted)

    def _read(self, row: WaitingRow) -> tuple[str, Moving]:
        """Return the name of a row, and its message."""
        entry = StoreEntry.decoded(row.entry)
        return entry.name, moving_of_entry(entry)

    def done(self) -> bool:
        assert self._last is not None
        is_gone: bool = self._store.remove(*self._last)
        self._is_moving = False
        return is_gone

    def close(self) -> None:
        if self._last is not None and not self._is_moving:
            self._note(None)

    def _note(self, name: str | None) -> None:
        def noted(seen: Snapshot) -> Change[None]:
            return Change(name, seen.now_us + _KEPT_US, None)

        self._store.state.change(_MOVING, noted)
        self._is_moving = name is not None


def moving_of_entry(entry: StoreEntry) -> Moving:
    """Convert an entry, of RabbitMQ or of a kombu channel, to a message that can be moved."""
    if "delivery_tag" in entry.properties:  # of kombu's virtual transports
        return moving_of(dumps(message_of(entry)), queue=entry.queue or "", due_us=entry.due_us)
    delayed = Delayed(
        entry.delivery_id,
        entry.due_us,
        entry.exchange,
        entry.routing_key,
        entry.queue,
        entry.expires_ms,
        entry.cancelled,
    )
    return Moving(entry.body, entry.properties, delayed)
