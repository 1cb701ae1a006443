"""Publishes a message with ``apply_async``, and changes a stored state in the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ..errors import CannotDelay
from .interface import Change, Decide, Publish, RecordName, Records, Snapshot


class NotPublished(Exception):
    """Raised to end ``apply_async`` early, if no message is needed."""


#: Puts what replaced messages have collected into a new one. All are ``StoreEntry``.
Collect: TypeAlias = Callable[[Any, Sequence[Any]], Any]


@dataclass
class RecordedPublish:
    """Publishes a task's message, and changes the state of a key or schedule entry.

    Both happen in one step. A key is a debounce, throttle or unique key.

    - *name*: the name of the state.
    - *decide*: a function that returns a :class:`Change`: the new state and the due time.
    - *answer*: the result of *decide* for the caller; None until :meth:`settle` has been called.
    - *due_us*: the due time of the published message; None if no message was published.
    - *collect*: a function that completes the message by those that it replaces, or None.
    """

    task_id: str
    name: RecordName
    decide: Decide[Any]
    answer: Any = None
    due_us: int | None = None
    collect: Collect | None = None
    _replaced: Sequence[Any] = ()

    def settle(
        self, records: Records, publish: Publish, decoded: Callable[[str], Any] = str
    ) -> None:
        """Store the new state that *decide* returns, and publish the message.

        If *decide* returns no due time, store the state and raise NotPublished. *decoded* makes a
        ``StoreEntry`` of the text of a waiting message.
        """

        due_us: int | None = None

        def look(texts: Sequence[str]) -> None:
            self._replaced = [decoded(text) for text in texts]

        def decided(snapshot: Snapshot) -> Change[Any]:
            nonlocal due_us
            change = self.decide(snapshot)
            due_us = change.due_us
            return change if self.collect is None else replace(change, look=look)

        self.answer = records.change(self.name, decided, publish)
        if due_us is None:
            raise NotPublished
        self.due_us = due_us

    def collected(self, entry: Any) -> Any:
        """Return the ``StoreEntry`` to publish, with what those that it replaces have collected."""
        return self.collect(entry, self._replaced) if self.collect and self._replaced else entry


#: The :class:`RecordedPublish` that this thread has begun, if any. Channels look here first, which
#: saves a function call for all other messages.
underway: ContextVar[RecordedPublish | None] = ContextVar("native_delay_publish", default=None)


@contextmanager
def publishing(recorded: RecordedPublish) -> Iterator[None]:
    """A ``with`` block that publishes a task and changes a stored state in one step.

    For example, the stored state of a debounce key has the id of the waiting task. The function
    ``recorded.decide`` computes the new state, and decides if the task is published. If the task is
    not published, the block ends without an error.

    Raises CannotDelay if the block publishes to a broker other than the app's broker, or to an
    exchange without a queue.
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
            "nothing was sent: expected a message to a queue of this app's broker. bulk() sends no "
            "task with a key: call its delay() instead. Else leave out the options connection and "
            "producer, and bind its exchange to a queue"
        )


def publish_of(headers: Mapping[str, Any] | None) -> RecordedPublish | None:
    """Return the state change to make when the message with *headers* is published, or None."""
    recorded = underway.get()
    if recorded is None or not headers or headers.get("id") != recorded.task_id:
        return None
    return recorded
