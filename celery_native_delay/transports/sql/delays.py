"""Publish delayed messages by inserts into a database."""

from __future__ import annotations

from typing import Any, NamedTuple, Self
from uuid import uuid4

from ...due_time import milliseconds_up
from ...records.publishing import RecordedPublish
from ...settings import DelaySettings
from ...urls import without_password
from ..virtual import delays
from ..virtual.status import Status
from ..virtual.watching import warn_if_nothing_promotes
from ..virtual.wrapping import due_then, encoded, id_of, wrapped
from .records import StoreRecords
from .store import Store

#: The queue name that the store has for a message to a fanout exchange.
BROADCAST = ""


class StoreMessage(NamedTuple):
    """A message to insert into the database table of waiting messages."""

    queue: str
    due_us: int
    task_id: str
    envelope: str

    @property
    def size_bytes(self) -> int:
        return len(self.envelope)

    def another(self, envelope: str, *, due_us: int, task_id: str, delivery_tag: str) -> Self:
        return self.__class__(self.queue, due_us, task_id, envelope)


class Delays(delays.Delays):
    """Publishes delayed messages on one channel, by inserts into a database."""

    def __init__(self, settings: DelaySettings, url: str) -> None:
        super().__init__(settings)
        self._url = url
        self._place = f"{settings.namespace} of {without_password(url)}"

    @property
    def store(self) -> Store:
        """Return the database of waiting messages; if :attr:`refusal` is an error, raise it."""
        self.check_settings()
        return Store.of(self._url, self.settings.namespace)

    @property
    def records(self) -> StoreRecords:
        """Return the storage for task state, such as debounce keys, in this channel's database."""
        return self.store.records

    def publish(self, message: dict[str, Any], queue: str, *, due_us: int) -> None:
        """Insert a delayed message for *queue* into the database."""
        self._add(self.stored(message, queue, due_us=due_us))

    def publish_keyed(self, keyed: RecordedPublish, message: dict[str, Any], queue: str) -> None:
        keyed.settle(
            self.records,
            lambda due_us, *_: self.stored(due_then(message, due_us), queue, due_us=due_us),
        )
        self.watch()

    def watch(self) -> None:
        """Log a warning if messages are overdue and no process moves due messages."""
        warn_if_nothing_promotes(
            self._place, lambda: Status.of(self._place, self.store.look_for_dispatcher())
        )

    def stored(self, message: dict[str, Any], queue: str, *, due_us: int) -> StoreMessage:
        """Encode a delayed message for the database; raise DelayTooLong for too long delays."""
        self.check_reach(due_us)
        return self._put(message, queue, due_us)

    def put_back(self, message: dict[str, Any], queue: str, *, due_us: int) -> None:
        """Insert a message again, because a worker received the message before the due time."""
        # The worker acknowledges the old delivery tag.
        properties = {**message["properties"], "delivery_tag": str(uuid4())}
        self._add(self._put({**message, "properties": properties}, queue, due_us))

    def _add(self, put: StoreMessage) -> None:
        self.store.add(put.queue, put.envelope, due_us=put.due_us, task_id=put.task_id)
        self.watch()

    @staticmethod
    def _put(message: dict[str, Any], queue: str, due_us: int) -> StoreMessage:
        envelope = encoded(wrapped(message, due_ms=milliseconds_up(due_us)))
        return StoreMessage(queue, due_us, id_of(message), envelope)
