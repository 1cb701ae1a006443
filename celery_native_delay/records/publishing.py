"""Publishes a task with ``apply_async``, together with a change of stored state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..errors import CannotDelay
from .interface import Change, Decide, Publish, RecordName, Records, Snapshot


class NotPublished(Exception):
    """Raised if :attr:`RecordedPublish.decide` chooses to publish no message."""


@dataclass
class RecordedPublish:
    """Publishes one task together with a change of the stored state *name*.

    *decide* computes the change. Afterwards *answer* is the answer of the change. *due_us* is the
    message's due time in epoch microseconds, or None if no message was published.
    """

    task_id: str
    name: RecordName
    decide: Decide[Any]
    answer: Any = None
    due_us: int | None = None

    def settle(self, records: Records, publish: Publish) -> None:
        """Change the stored state and publish; raise NotPublished if no message was published."""

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
    """Let ``apply_async`` within the ``with`` block also change the stored state.

    The block ends without an error if the change publishes no message. Raises CannotDelay if the
    message reached no queue of the app's broker.
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
    """Return this thread's :class:`RecordedPublish` if its task id is in *headers*."""
    recorded = underway.get()
    if recorded is None or not headers or headers.get("id") != recorded.task_id:
        return None
    return recorded
