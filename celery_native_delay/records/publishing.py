"""Publishes a message through Celery's ``apply_async``, in one step with a change of a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..errors import CannotDelay
from .interface import Change, Decide, Publish, RecordName, Records, Snapshot


class NotPublished(Exception):
    """The function that changes the record decided not to publish the message."""


@dataclass
class RecordedPublish:
    """Publishes the message of one task in one step with a change of the record *name*.

    The function *decide* computes the change. After the step, *answer* is the answer of the change,
    and *due_us* is the due time of the message, or None if the message was not published.
    """

    task_id: str
    name: RecordName
    decide: Decide[Any]
    answer: Any = None
    due_us: int | None = None

    def settle(self, records: Records, publish: Publish) -> None:
        """Change the record; raise NotPublished if the change does not publish the message."""

        due_us: int | None = None

        def decided(snapshot: Snapshot) -> Change[Any]:
            nonlocal due_us
            change = self.decide(snapshot)
            due_us = change.due_us
            return change

        self.answer = records.change(self.name, decided, publish)
        if due_us is None:
            raise NotPublished
        self.due_us = due_us


#: The recorded publish of this thread, if any. Channels look here first, which saves a function
#: call for all other messages.
underway: ContextVar[RecordedPublish | None] = ContextVar("native_delay_publish", default=None)


@contextmanager
def publishing(recorded: RecordedPublish) -> Iterator[None]:
    """Let Celery publish one task in one step with a record in this block.

    The block also ends without an error if the record's change does not publish the message.

    Raises CannotDelay if the message never reached a queue of the app's broker.
    """
    token = underway.set(recorded)
    try:
        yield
    except NotPublished:
        pass
    finally:
        underway.reset(token)
    if recorded.answer is None:
        raise CannotDelay(
            "nothing was sent: expected a message to a queue of this app's broker; leave out the "
            "options connection and producer, and bind its exchange to a queue"
        )


def publish_of(headers: Mapping[str, Any] | None) -> RecordedPublish | None:
    """Return this thread's recorded publish if the message with these *headers* belongs to it."""
    recorded = underway.get()
    if recorded is None or not headers or headers.get("id") != recorded.task_id:
        return None
    return recorded
