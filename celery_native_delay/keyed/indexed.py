"""Records of keys beside a broker that cannot be looked into: see :mod:`..records.replacing`."""

from __future__ import annotations

from collections.abc import Callable
from secrets import token_hex
from time import time_ns

from ..records.interface import MARK_GRACE_MS, CompareAndSet, Index, Listed, RecordName
from ..records.replacing import publish_undecided
from .record import Record
from .records import ComparedRecords
from .rules import InBroker, Seen, Step


class IndexedKeyRecords(ComparedRecords):
    """The records of keys in one *index*; raises RecordsUnavailable."""

    def __init__(self, index: Index, longest_seconds: float) -> None:
        """*longest_seconds* is the longest wait of a message."""
        self._index = index
        self._mark_ms = round(longest_seconds * 1000) + MARK_GRACE_MS

    def read(self, name: str) -> Seen:
        return self._seen(name, None)

    def read_to_send(self, name: str) -> Seen:
        return self._seen(name, token_hex(16))

    def _seen(self, name: str, sends: str | None) -> Seen:
        looked = self._index.look(RecordName("key", name), sends, self._mark_ms)
        # Read after the answer: too far ahead by the way back, so that no task is early.
        ahead_us = time_ns() // 1000 - looked.now_us
        record = None if looked.text is None else Record.decoded(looked.text)
        waiting = tuple(
            InBroker(member, due_us)
            for member, due_us in looked.messages
            if record is not None and member.rpartition(":")[0] == record.id
        )
        return Seen(looked.now_us, record, waiting, sends, looked.text, ahead_us)

    def write(
        self, name: str, seen: Seen, step: Step, put: Callable[[int, str, int], Listed] | None
    ) -> bool:
        """*put* gets the due time, the delivery's id, and how far our clock is ahead of theirs."""
        new = None
        if step.due_us is not None:
            assert put is not None
            assert seen.sends is not None
            due_us, sends, ahead_us = step.due_us, seen.sends, seen.clock_ahead_us
            new = publish_undecided(
                self._index, sends, due_us, lambda: put(due_us, sends, ahead_us)
            )
        return self._index.compare_and_set(
            CompareAndSet(
                RecordName("key", name),
                None if seen.record is None else seen.text,
                None if step.record is None else step.record.encoded(),
                max(step.kept_us - seen.now_us, 0) // 1000 + 1,
                new,
                [message.place for message in seen.waiting] if step.replaces else (),
            )
        )

    def leave(self, seen: Seen) -> None:
        if seen.sends is not None:
            self._index.unmark(seen.sends)
