"""The protocol by which a message is replaced on a broker that cannot be looked into.

A message that waits there cannot be taken back. So:

1. ``Index.look()`` marks the new delivery as undecided: a worker that receives it now drops it;
2. :func:`publish_undecided` publishes the new message, confirmed;
3. ``Index.compare_and_set()`` makes the new message count and the old ones void, if nothing has
   changed since. A worker that receives a void message drops it.

A process that dies in between has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from secrets import token_hex
from time import time_ns
from typing import Any, Protocol

from ..errors import NativeDelayError, RecordsUnavailable
from .interface import (
    MARK_GRACE_MS,
    Change,
    CompareAndSet,
    Decide,
    Index,
    Listed,
    Looked,
    Put,
    RecordName,
    Records,
    T,
    tried_again,
)
from .waiting import Waiting, WaitingTasks

#: The mark of an undecided delivery is kept for longer than any message can wait: 25 years, in ms.
_UNDECIDED_MS = 25 * 366 * 86_400_000


class ComparedRecords(Records, Index):
    """Records that are read, and written if they are still the same: else from the beginning."""

    has_marks = True
    """False if the waiting messages themselves are the index, and are taken out of the broker."""

    def read(self, name: RecordName) -> Looked:
        return self.look(name, None, 0)

    def change(self, name: RecordName, decide: Decide[T], put: Put | None = None) -> T:
        def attempt() -> Change[T] | None:
            delivery_id = "" if put is None else token_hex(16)
            marked = delivery_id if self.has_marks else ""
            looked = self.look(name, marked, _UNDECIDED_MS)
            # Read after the answer: too far ahead by the way back, so that no task is early.
            ahead_us = time_ns() // 1000 - looked.now_us
            change = decide(looked)
            new, due_us = None, change.due_us
            if due_us is not None:
                assert put is not None
                publish = partial(put, due_us, delivery_id, ahead_us)
                new = publish_undecided(self, marked, due_us, publish) if marked else publish()
            elif marked:
                self.unmark(marked)
            if new is None and change.text == looked.text:
                return change
            kept_ms = max(change.kept_us - looked.now_us, 0) // 1000 + 1
            gone = [member for member, _ in looked.messages] if change.replaces else ()
            step = CompareAndSet(name, looked.text, change.text, kept_ms, new, gone)
            return change if self.compare_and_set(step) else None

        return tried_again(name.name, attempt).answer


def publish_undecided(index: Index, delivery_id: str, due_us: int, publish: Callable[[], T]) -> T:
    """Call *publish*, which publishes the undecided delivery; if it fails, see to the mark."""
    try:
        return publish()
    except NativeDelayError:
        index.unmark(delivery_id)
        raise
    except Exception:
        # The broker may hold the message all the same.
        left_ms = max(due_us - time_ns() // 1000, 0) // 1000 + MARK_GRACE_MS
        with suppress(RecordsUnavailable):
            index.unmark(delivery_id, left_ms)
        raise


class Republishes(Protocol):
    """A transport's part: it reads its own entries, and publishes their messages again."""

    def waiting(self, member: str, entry: str, due_us: int) -> Waiting | None:
        """The task of an entry, as people see it."""

    def publish_again(self, entry: str, due_us: int, delivery_id: str, *, cancelled: bool) -> str:
        """Publish the message of *entry*, due then, and return its new entry."""

    def check_reach(self, due_us: int) -> None:
        """Raise DelayTooLong for a due time that is too far away."""


class RecordedTasks(WaitingTasks):
    """Waiting tasks that an *index* lists; mixed in before the listing of a backend."""

    index: Index
    _delays: Republishes

    def _replace(
        self, member: str, entry: Any, task: Waiting, due_us: int | None, *, cancelled: bool
    ) -> tuple[str, int] | None:
        text = entry.decode() if isinstance(entry, bytes) else entry
        new_due_us = time_ns() // 1000 if due_us is None else due_us
        wait_ms = max(new_due_us // 1000 - time_ns() // 1_000_000, 0)
        new_id = token_hex(16)
        new_member = f"{member.rpartition(':')[0]}:{new_id}"
        self.index.look(None, new_id, wait_ms + MARK_GRACE_MS)
        new_entry = publish_undecided(
            self.index,
            new_id,
            new_due_us,
            lambda: self._delays.publish_again(text, new_due_us, new_id, cancelled=cancelled),
        )
        new = Listed(new_member, new_due_us, "" if cancelled else new_entry)
        counts = self.index.compare_and_set(CompareAndSet(new=new, gone=[member]))
        return (new_member, new_due_us) if counts else None
