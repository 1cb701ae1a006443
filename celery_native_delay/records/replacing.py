"""Replaces a waiting message on RabbitMQ, SQS and pgmq, which cannot remove messages.

1. ``Index.look()`` stores that the new message is "undecided": workers drop undecided messages.
2. :func:`publish_undecided` publishes the new message, and waits for the broker's confirm.
3. ``Index.compare_and_set()`` stores that workers drop the old message and run the new message.

If another process has changed the task since step 1, step 3 stores instead that workers drop the
new message. If the process dies before step 3, workers run the old message, and drop the new
message.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from secrets import token_hex
from time import time_ns
from typing import Any, Protocol

from ..errors import NativeDelayError, NotConfirmed, RecordsUnavailable
from .interface import (
    MARK_GRACE_MS,
    Change,
    CompareAndSet,
    Decide,
    Index,
    IndexEntry,
    Publish,
    RecordName,
    Records,
    Snapshot,
    T,
    tried_again,
)
from .waiting import Waiting, WaitingTasks

#: An "undecided" mark is kept for 25 years, in ms: longer than any message can wait.
_UNDECIDED_MS = 25 * 366 * 86_400_000

#: Microseconds by which each further attempt to replace a message makes the new message due later.
_LATER_US = 100_000


class ComparedRecords(Records, Index):
    """Changes task state, such as debounce keys, by compare-and-set; retries after a conflict."""

    has_marks = True
    """True if the broker cannot remove waiting messages: marks then tell workers to drop them."""

    def read(self, name: RecordName) -> Snapshot:
        return self.look(name, None, 0)

    def change(self, name: RecordName, decide: Decide[T], publish: Publish | None = None) -> T:
        def attempt() -> Change[T] | None:
            delivery_id = "" if publish is None else token_hex(16)
            marked = delivery_id if self.has_marks else ""
            snapshot = self.look(name, marked, _UNDECIDED_MS)
            # The number includes the time that the answer took, so it is too large. Tasks are late
            # by that time, and never early.
            ahead_us = time_ns() // 1000 - snapshot.now_us
            change = decide(snapshot)
            new, due_us = None, change.due_us
            if due_us is not None:
                assert publish is not None
                send = partial(publish, due_us, delivery_id, ahead_us)
                new = publish_undecided(self, marked, due_us, send) if marked else send()
            elif marked:
                self.unmark(marked)
            if new is None and change.text == snapshot.text:
                return change
            kept_ms = max(change.kept_us - snapshot.now_us, 0) // 1000 + 1
            gone = [member for member, _ in snapshot.messages] if change.replaces else ()
            step = CompareAndSet(name, snapshot.text, change.text, kept_ms, new, gone)
            return change if self.compare_and_set(step) else None

        return tried_again(name.name, attempt).answer


def publish_undecided(index: Index, delivery_id: str, due_us: int, publish: Callable[[], T]) -> T:
    """Publish a message whose task runs only if :meth:`.Index.compare_and_set` later succeeds."""
    try:
        return publish()
    except Exception as exc:
        if isinstance(exc, NativeDelayError) and not isinstance(exc, NotConfirmed):
            index.unmark(delivery_id)
            raise
        # The broker may have the message in spite of the error.
        left_ms = max(due_us - time_ns() // 1000, 0) // 1000 + MARK_GRACE_MS
        with suppress(RecordsUnavailable):
            index.unmark(delivery_id, left_ms)
        raise


class Republishes(Protocol):
    """Publishes waiting messages again, for brokers that cannot change a waiting message."""

    def waiting(self, member: str, entry: str, due_us: int) -> Waiting | None:
        """Convert a stored message to a waiting task, or to None if cancelled."""

    def publish_again(self, entry: str, due_us: int, delivery_id: str, *, cancelled: bool) -> str:
        """Publish a copy of a waiting message with a new due time; return the copy's content.

        *entry* is the message's content, *delivery_id* the copy's delivery id. If *cancelled* is
        True, the worker does not run the copy, and reports the task as revoked.
        """

    def check_reach(self, due_us: int) -> None:
        """Raise DelayTooLong if a due time is beyond the broker's longest delay."""


class RecordedTasks(WaitingTasks):
    """A mixin that cancels or reschedules a task by publishing the task's message again."""

    index: Index
    _delays: Republishes

    def _replace(
        self,
        member: str,
        entry: Any,
        task: Waiting,
        due_us: int | None,
        *,
        cancelled: bool,
        attempt: int,
    ) -> tuple[str, int] | None:
        text = entry.decode() if isinstance(entry, bytes) else entry
        # A worker that receives the new message before compare_and_set drops it.
        new_due_us = max(due_us or 0, time_ns() // 1000 + attempt * _LATER_US)
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
        new = IndexEntry(new_member, new_due_us, "" if cancelled else new_entry)
        replaced = self.index.compare_and_set(CompareAndSet(new=new, gone=[member]))
        return (new_member, new_due_us) if replaced else None
