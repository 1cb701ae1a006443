"""Publishes a task with a debounce, throttle or unique key by Celery's ``apply_async``."""

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
    """Another task already has the debounce, throttle or unique key. Nothing was published."""

    def __init__(self, task_id: str) -> None:
        super().__init__(task_id)
        self.task_id = task_id


@dataclass
class KeyedPublish:
    """A publish of a task with a debounce, throttle or unique key.

    - *rule*: the function that decides if the task is published.
    - *step*: the decision of *rule*, or None before the publish.
    - *replaced*: the id of the waiting task that the new task replaced, or None.
    """

    name: str
    rule: Rule
    task_id: str
    step: Step | None = None
    replaced: str | None = None

    @property
    def due_us(self) -> int | None:
        """The due time in microseconds since the epoch; None before the publish."""
        return None if self.step is None else self.step.due_us

    def settle(self, records: Records, publish: Publish) -> None:
        """Publish the message, and store the key's new state in the same step.

        Raises AnotherStands if another task has the key.
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
    """Let the channel use *keyed* for the message that this ``with`` block publishes."""
    token = underway.set(keyed)
    try:
        yield
    finally:
        underway.reset(token)


def keyed_publish(headers: Mapping[str, Any] | None) -> KeyedPublish | None:
    """Return the :class:`KeyedPublish` of the message with these headers, or None."""
    keyed = underway.get()
    if keyed is None or not headers or headers.get("id") != keyed.task_id:
        return None
    return keyed
