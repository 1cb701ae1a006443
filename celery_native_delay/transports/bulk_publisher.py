"""Publishing many messages: one connection, templates, batches that wait for no answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from time import time_ns
from typing import Any, Self

from kombu import Producer

from .outbox import Outbox
from .random_ids import RandomIds

#: For so long an exchange is taken to lead where it did.
ROUTE_SECONDS = 60.0

#: Task id, ETA, argsrepr, kwargsrepr and body: the values in which two tasks of a kind differ.
TaskValues = tuple[str, str, str, str, bytes]


class Learnt(ABC):
    """A template made of one message, for others that go the same way.

    The ``learnt.py`` of each family of brokers says how.
    """

    def __init__(self, body: bytes) -> None:
        #: Of the task it was learnt from.
        self.body = body
        #: Until then the exchange is taken to lead where it did.
        self.valid_until_us = time_ns() // 1000 + round(ROUTE_SECONDS * 1_000_000)

    @classmethod
    @abstractmethod
    def of(cls, message: Any, channel: Any) -> Self | None:
        """A template of *message*, which *channel* collected; None if it makes none.

        A template is only used if it makes the very bytes that the long way did.
        """

    @staticmethod
    @abstractmethod
    def headers_of(message: Any) -> Mapping[str, Any]:
        """Headers of a message that went the long way."""

    @abstractmethod
    def difference(self, message: Any, values: TaskValues) -> str:
        """Parts of *message* that would be made otherwise of *values*, in words; "" if none."""

    @abstractmethod
    def another(self, channel: Any, ids: RandomIds, due_us: int, values: TaskValues) -> Any:
        """Another message for the same destination; None if it is due. DelayTooLong."""


class BulkPublisher:
    """A publisher of many messages through *outbox*. For one thread."""

    def __init__(self, outbox: Outbox[Any, Any], learnt: type[Learnt]) -> None:
        self.outbox = outbox
        self._learnt = learnt
        self._ids = RandomIds()
        #: Messages that the last publish sent the long way.
        self._last: list[Any] = []

    def publish(self, publish: Callable[[Any], object]) -> None:
        """Send one message the long way: *publish* gets a kombu producer.

        Raises what *publish* does, and what :meth:`Outbox.patiently` does without a connection;
        it was not sent then.
        """

        def collect(channel: Any) -> Any:
            channel.collected, channel.returned = [], []
            publish(Producer(channel, auto_declare=False))
            return channel.collected, channel.returned

        with self.outbox.lock:
            self.outbox.make_room()
            self._last, returned = self.outbox.patiently(collect)
            self.outbox.refuse_returned(returned)
            for message in self._last:
                self.outbox.take(message)

    @property
    def last_headers(self) -> Mapping[str, Any] | None:
        """Headers of the one message that was last sent the long way; None if it was not one."""
        last = self._one()
        return None if last is None else self._learnt.headers_of(last)

    def learn(self) -> Learnt | None:
        """A template of the last message, for others like it; None if it makes none."""
        last = self._one()
        return None if last is None else self._learnt.of(last, self.outbox.channel)

    def difference(self, learnt: Learnt, values: TaskValues) -> str:
        """:meth:`Learnt.difference` of the last message."""
        last = self._one()
        if last is None:
            return "how many messages or queues they are"
        return learnt.difference(last, values)

    def send(self, learnt: Learnt, due_us: int, values: TaskValues) -> bool:
        """Send a task by its template; False if only the long way will do.

        That is for a task that is due already, when what was learnt is too old, or the connection
        is gone. Raises as :meth:`publish`, and why it cannot wait; not sent.
        """
        now_us = time_ns() // 1000
        if due_us <= now_us or now_us > learnt.valid_until_us:
            return False
        outbox = self.outbox
        with outbox.lock:  # else the other thread may lose the connection in between
            channel = outbox.channel
            if channel is None or channel.connection is None:  # the long way connects again
                return False
            outbox.make_room()
            if outbox.channel is not channel or channel.connection is None:
                return False  # lost while room was made
            message = learnt.another(channel, self._ids, due_us, values)
            if message is not None:
                outbox.take(message)
        return message is not None

    def _one(self) -> Any:
        return self._last[0] if len(self._last) == 1 else None


def differing(what: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Names whose values are not written alike, such as "header 'tenant'"; "" if there is none.

    *what* is the names' kind; 1, 1.0 and True are three values. No value is given away.
    """
    names = [
        name
        for name in {**expected, **found}
        if name not in expected or name not in found or repr(expected[name]) != repr(found[name])
    ]
    return f"{what} {', '.join(map(repr, names))}" if names else ""
