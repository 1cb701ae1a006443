"""Delayed publishing on one channel: each message is inserted into the store."""

from __future__ import annotations

from typing import Any, NamedTuple, Self
from uuid import uuid4

from ...due_time import milliseconds_up
from ...keyed.publishing import KeyedPublish
from ...settings import DelaySettings
from ...urls import without_password
from ..virtual import delays
from ..virtual.status import Status
from ..virtual.watching import warn_if_nothing_promotes
from ..virtual.wrapping import due_then, encoded, id_of, wrapped
from .records import StoreRecords
from .store import Store

#: The queue name in the store of a message to a fanout exchange.
BROADCAST = ""


class StoreMessage(NamedTuple):
    """A message that is to be stored: its destination *queue*, due time, task id and envelope."""

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
    """Delayed publishing on one channel, into the store at *url*."""

    def __init__(self, settings: DelaySettings, url: str) -> None:
        super().__init__(settings)
        self._url = url
        self._place = f"{settings.namespace} of {without_password(url)}"

    @property
    def store(self) -> Store:
        """The store of this process. Raises UnsupportedBroker if the settings name no store."""
        self.check_settings()
        return Store.of(self._url, self.settings.namespace)

    @property
    def records(self) -> StoreRecords:
        """The records in the same database."""
        return self.store.records

    def publish(self, message: dict[str, Any], queue: str, *, due_us: int) -> None:
        """Store kombu's *message* for *queue*, which is :data:`BROADCAST` for a fanout exchange.

        Raises DelayTooLong, SettingsError, StoreUnavailable or UnsupportedBroker. Then nothing was
        stored.
        """
        self._add(self.stored(message, queue, due_us=due_us))

    def publish_keyed(self, keyed: KeyedPublish, message: dict[str, Any], queue: str) -> None:
        """Store kombu's *message* as the rule of its key decides.

        Raises the errors of :meth:`publish`, and AnotherStands if another task has the key.
        """
        keyed.settle(
            self.records,
            lambda due_us, *_: self.stored(due_then(message, due_us), queue, due_us=due_us),
        )
        self.watch()

    def watch(self) -> None:
        """Once a minute, after a publish, warn if no worker dispatches from the store."""
        warn_if_nothing_promotes(
            self._place, lambda: Status.of(self._place, self.store.look_for_dispatcher())
        )

    def stored(self, message: dict[str, Any], queue: str, *, due_us: int) -> StoreMessage:
        """kombu's *message* in the form that is stored. Raises the errors of :meth:`publish`."""
        self.check_reach(due_us)
        return self._put(message, queue, due_us)

    def put_back(self, message: dict[str, Any], queue: str, *, due_us: int) -> None:
        """Store a message that a worker has received from *queue* too early, for that queue.

        It gets a new delivery tag, because its present one is about to be acknowledged. The longest
        delay does not apply.
        """
        properties = {**message["properties"], "delivery_tag": str(uuid4())}
        self._add(self._put({**message, "properties": properties}, queue, due_us))

    def _add(self, put: StoreMessage) -> None:
        self.store.add(put.queue, put.envelope, due_us=put.due_us, task_id=put.task_id)
        self.watch()

    @staticmethod
    def _put(message: dict[str, Any], queue: str, due_us: int) -> StoreMessage:
        envelope = encoded(wrapped(message, due_ms=milliseconds_up(due_us)))
        return StoreMessage(queue, due_us, id_of(message), envelope)
