"""Delayed publishing on one channel: an insert a message, and it is safe."""

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

#: The queue of a message for all that listen to its exchange.
BROADCAST = ""


class StoreMessage(NamedTuple):
    """A message that is to wait for *queue* under *task_id*."""

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
    """Delayed delivery on one channel."""

    def __init__(self, settings: DelaySettings, url: str) -> None:
        super().__init__(settings)
        self._url = url
        self._place = f"{settings.namespace} of {without_password(url)}"

    @property
    def store(self) -> Store:
        """The store that messages wait in; another one after a fork. Raises why there is none."""
        self.check_settings()
        return Store.of(self._url, self.settings.namespace)

    @property
    def records(self) -> StoreRecords:
        """The records beside what waits."""
        return self.store.records

    def publish(self, message: dict[str, Any], queue: str, *, due_us: int) -> None:
        """Store kombu's *message* for *queue*, or for :data:`BROADCAST`.

        DelayTooLong, SettingsError, StoreUnavailable, UnsupportedBroker: nothing was stored.
        """
        self._add(self.stored(message, queue, due_us=due_us))

    def publish_keyed(self, keyed: KeyedPublish, message: dict[str, Any], queue: str) -> None:
        """Store kombu's *message* as its key has it; raises as :meth:`publish`, AnotherStands."""
        keyed.settle(
            self.records,
            lambda due_us, *_: self.stored(due_then(message, due_us), queue, due_us=due_us),
        )
        self.watch()

    def watch(self) -> None:
        """Look now and then, after publishing, whether anything dispatches."""
        warn_if_nothing_promotes(
            self._place, lambda: Status.of(self._place, self.store.look_for_dispatcher())
        )

    def stored(self, message: dict[str, Any], queue: str, *, due_us: int) -> StoreMessage:
        """kombu's *message* as it is stored; raises as :meth:`publish`."""
        self.check_reach(due_us)
        return self._put(message, queue, due_us)

    def put_back(self, message: dict[str, Any], queue: str, *, due_us: int) -> None:
        """Let a received message, as it lay in *queue*, wait (again) for it alone.

        It gets a new delivery tag: its present one is about to be acknowledged. It may be further
        away than a producer's limit.
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
