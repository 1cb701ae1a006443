"""A publish under a key, from the call to the channel that does it.

It goes through Celery's ``apply_async``, which knows nothing of keys; the channel finds it again by
the id of its task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..records.interface import Put, Records
from .records import KeyRecords
from .rules import Rule, Step


class AnotherStands(Exception):
    """Another task came to stand for the key meanwhile; nothing was sent."""

    def __init__(self, task_id: str) -> None:
        super().__init__(task_id)
        self.task_id = task_id


@dataclass
class KeyedPublish:
    """A message of task *task_id* on its way, to be put in as *rule* decides for *name*'s record.

    Once that is done *step* tells how, and *replaced* which task's message was taken out.
    """

    name: str
    rule: Rule
    task_id: str
    step: Step | None = None
    replaced: str | None = None

    @property
    def due_us(self) -> int | None:
        """The due time, once the message is there."""
        return None if self.step is None else self.step.due_us

    def settle(self, records: Records, put: Put) -> None:
        """Put the message in by *records* and *put*; AnotherStands if it is not wanted any more."""
        seen, step = KeyRecords(records).change(self.name, self.rule, put)
        # Its own id: an attempt before, whose answer was lost, has done it.
        if step.stands not in (None, self.task_id):
            raise AnotherStands(str(step.stands))
        self.step = step
        if step.replaces and seen.record is not None and seen.record.id != self.task_id:
            self.replaced = seen.record.id


#: What is being published under a key, if anything. Channels look here first, so that all other
#: messages pass one function less.
underway: ContextVar[KeyedPublish | None] = ContextVar("native_delay_keyed", default=None)


@contextmanager
def publishing(keyed: KeyedPublish) -> Iterator[None]:
    """A block that publishes the message of *keyed*."""
    token = underway.set(keyed)
    try:
        yield
    finally:
        underway.reset(token)


def keyed_publish(headers: Mapping[str, Any] | None) -> KeyedPublish | None:
    """The publish that a message with these *headers* is, None for any other message."""
    keyed = underway.get()
    if keyed is None or not headers or headers.get("id") != keyed.task_id:
        return None
    return keyed
