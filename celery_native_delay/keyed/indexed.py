"""Records of keys beside a broker that cannot be looked into: see :mod:`..records.replacing`."""

from __future__ import annotations

from collections.abc import Callable
from secrets import token_hex

from ..records.interface import MARK_GRACE_MS, CompareAndSet, Index, Listed, RecordName
from ..records.replacing import publish_undecided
from .record import Record
from .records import ComparedRecords
from .rules import Seen, Step

#: Publishes a delivery, given its due time and its id; returns what the index lists.
Put = Callable[[int, str], Listed]


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
        looked = self._index.look(_of_key(name), sends, self._mark_ms)
        if looked.text is None:
            return Seen(looked.now_us, None, sends=sends)
        record = Record.decoded(looked.text)
        waiting = (each for each in looked.members if each.rpartition(":")[0] == record.id)
        return Seen(looked.now_us, record, tuple(waiting), sends, looked.text)

    def write(self, name: str, seen: Seen, step: Step, put: Put | None) -> bool:
        new = None
        if step.due_us is not None:
            assert put is not None
            assert seen.sends is not None
            due_us, sends = step.due_us, seen.sends
            new = publish_undecided(self._index, sends, due_us, lambda: put(due_us, sends))
        return self._index.compare_and_set(
            CompareAndSet(
                _of_key(name),
                None if seen.record is None else seen.text,
                None if step.record is None else step.record.encoded(),
                max(step.kept_us - seen.now_us, 0) // 1000 + 1,
                new,
                seen.waiting if step.replaces else (),
            )
        )

    def leave(self, seen: Seen) -> None:
        if seen.sends is not None:
            self._index.unmark(seen.sends)


def _of_key(name: str) -> RecordName:
    return RecordName("key", name)
