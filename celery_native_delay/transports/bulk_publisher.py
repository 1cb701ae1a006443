"""Publishing many messages: one connection, templates, batches that wait for no answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from secrets import token_bytes
from time import time_ns
from typing import Any, Self

from kombu import Producer

from .outbox import Outbox

#: For so long an exchange is taken to lead where it did.
ROUTE_SECONDS = 60.0

_IDS_AT_A_TIME = 256
_UUID_VARIANTS = "89ab"

#: Task id, ETA, argsrepr, kwargsrepr and body: the values in which two tasks of a kind differ.
TaskValues = tuple[str, str, str, str, bytes]


class TaskTemplate(ABC):
    """A template made of one message, for others that go the same way.

    The ``template.py`` of each family of brokers says how.
    """

    def __init__(self, body: bytes) -> None:
        #: The body of the task it was made of.
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
    def makes(self, message: Any, values: TaskValues) -> bool:
        """True if it makes *message* of *values*, byte for byte."""

    @abstractmethod
    def another(self, channel: Any, ids: RandomIds, due_us: int, values: TaskValues) -> Any:
        """Another message for the same destination; None if it is due. DelayTooLong."""


class BulkPublisher:
    """A publisher of many messages through *outbox*. For one thread."""

    def __init__(self, outbox: Outbox[Any, Any], template: type[TaskTemplate]) -> None:
        self.outbox = outbox
        self._template = template
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
        return None if last is None else self._template.headers_of(last)

    def learn(self) -> TaskTemplate | None:
        """A template of the last message, for others like it; None if it makes none."""
        last = self._one()
        return None if last is None else self._template.of(last, self.outbox.channel)

    def made_by(self, template: TaskTemplate, values: TaskValues) -> bool:
        """True if a template makes the last message of *values*, byte for byte."""
        last = self._one()
        return last is not None and template.makes(last, values)

    def send(self, template: TaskTemplate, due_us: int, values: TaskValues) -> bool:
        """Send a task by its template; False if only the long way will do.

        That is for a task that is due already, when the template is too old, or the connection
        is gone. Raises as :meth:`publish`, and why it cannot wait; not sent.
        """
        now_us = time_ns() // 1000
        if due_us <= now_us or now_us > template.valid_until_us:
            return False
        outbox = self.outbox
        with outbox.lock:  # else the other thread may lose the connection in between
            channel = outbox.channel
            if channel is None or channel.connection is None:  # the long way connects again
                return False
            outbox.make_room()
            if outbox.channel is not channel or channel.connection is None:
                return False  # lost while room was made
            message = template.another(channel, self._ids, due_us, values)
            if message is not None:
                outbox.take(message)
        return message is not None

    def _one(self) -> Any:
        return self._last[0] if len(self._last) == 1 else None


class RandomIds:
    """A source of random ids, for one thread of one process.

    It makes them by the hundred: asking the system for each takes longer than all else about it.
    """

    def __init__(self) -> None:
        self._left: list[str] = []

    def hex(self) -> str:
        """128 random bits as 32 digits."""
        if not self._left:
            many = token_bytes(16 * _IDS_AT_A_TIME).hex()
            self._left = [many[at : at + 32] for at in range(0, len(many), 32)]
        return self._left.pop()

    def uuid(self) -> str:
        """A UUID of version 4. https://www.rfc-editor.org/rfc/rfc9562#section-5.4"""
        bits = self.hex()
        variant = _UUID_VARIANTS[int(bits[16], 16) & 3]
        return f"{bits[:8]}-{bits[8:12]}-4{bits[13:16]}-{variant}{bits[17:20]}-{bits[20:]}"
