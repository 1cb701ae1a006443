"""A publish with a key, on its way from the call to the channel.

The publish goes through Celery's ``apply_async``, which knows nothing of keys. The channel
recognises the message by the id of its task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..records.interface import Publish, Records
from .records import KeyRecords
from .rules import Rule, Step


class AnotherStands(Exception):
    """Another task has the key by now, so nothing was published. *task_id* is that task's id."""

    def __init__(self, task_id: str) -> None:
        super().__init__(task_id)
        self.task_id = task_id


@dataclass
class KeyedPublish:
    """The message of task *task_id*, which is published as *rule* decides.

    *name* is the name of the key's record. After the publish *step* is the decision of *rule*, and
    *replaced* is the id of the task whose waiting message was cancelled, if any.
    """

    name: str
    rule: Rule
    task_id: str
    step: Step | None = None
    replaced: str | None = None

    @property
    def due_us(self) -> int | None:
        """The due time in microseconds, once the message is published."""
        return None if self.step is None else self.step.due_us

    def settle(self, records: Records, publish: Publish) -> None:
        """Publish the message by *publish*, and change the record in *records* in the same step.

        Raises AnotherStands if another task has the key by now.
        """
        seen, step = KeyRecords(records).change(self.name, self.rule, publish)
        # Our own id: an earlier attempt has published the message, and its answer was lost.
        if step.stands not in (None, self.task_id):
            raise AnotherStands(str(step.stands))
        self.step = step
        if step.replaces and seen.record is not None and seen.record.id != self.task_id:
            self.replaced = seen.record.id


#: The publish with a key that runs in this thread, if any. Channels look here first, which saves a
#: function call for all other messages.
underway: ContextVar[KeyedPublish | None] = ContextVar("native_delay_keyed", default=None)


@contextmanager
def publishing(keyed: KeyedPublish) -> Iterator[None]:
    """A block in which Celery publishes the message of *keyed*."""
    token = underway.set(keyed)
    try:
        yield
    finally:
        underway.reset(token)


def keyed_publish(headers: Mapping[str, Any] | None) -> KeyedPublish | None:
    """The publish with a key to which a message with these *headers* belongs; None if to none."""
    keyed = underway.get()
    if keyed is None or not headers or headers.get("id") != keyed.task_id:
        return None
    return keyed
