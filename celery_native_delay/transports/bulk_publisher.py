"""Publish many messages on one connection, without waiting for each confirm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from secrets import token_bytes
from typing import Any, Self

from kombu import Producer

from ..now import time_ns
from .outbox import Outbox

#: Seconds until a template is made anew, because the bindings of its exchange may have changed.
ROUTE_SECONDS = 60.0

_IDS_AT_A_TIME = 256
_UUID_VARIANTS = "89ab"

#: Task id, ETA, argsrepr, kwargsrepr and body: the values in which two tasks of a kind differ.
TaskValues = tuple[str, str, str, str, bytes]


class TaskTemplate(ABC):
    """An encoded task message in which only the id, the due time and the arguments change."""

    def __init__(self, body: bytes) -> None:
        #: The body of the task whose message became the template.
        self.body = body
        #: When the template ends, in microseconds since the epoch.
        self.valid_until_us = time_ns() // 1000 + round(ROUTE_SECONDS * 1_000_000)

    @classmethod
    @abstractmethod
    def of(cls, message: Any, channel: Any) -> Self | None:
        """Make a template from *message*; return None if the template cannot copy kombu's bytes."""

    @staticmethod
    @abstractmethod
    def headers_of(message: Any) -> Mapping[str, Any]:
        """Return the headers of a message that kombu made."""

    @abstractmethod
    def makes(self, message: Any, values: TaskValues) -> bool:
        """Return True if this template with *values* produces the same bytes as *message*."""

    @abstractmethod
    def another(self, channel: Any, ids: RandomIds, due_us: int, values: TaskValues) -> Any:
        """Make a message with *values*; return None if the message is already due."""


class BulkPublisher:
    """Publishes many messages through *outbox*, which keeps unconfirmed messages."""

    def __init__(self, outbox: Outbox[Any, Any], template: type[TaskTemplate]) -> None:
        self.outbox = outbox
        self._template = template
        self._ids = RandomIds()
        #: The messages that the last :meth:`publish` made, one for each destination queue.
        self._last: list[Any] = []

    def publish(self, publish: Callable[[Any], object]) -> None:
        """Publish one message with kombu: call the function *publish* with a kombu producer.

        After an error the message was not sent.
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
        """Return the headers of the last published message, or None."""
        last = self._one()
        return None if last is None else self._template.headers_of(last)

    def learn(self) -> TaskTemplate | None:
        """Make a template (an encoded task message) of the last message, or return None."""
        last = self._one()
        return None if last is None else self._template.of(last, self.outbox.channel)

    def made_by(self, template: TaskTemplate, values: TaskValues) -> bool:
        """Return True if *template* with *values* produces the bytes of the last message."""
        last = self._one()
        return last is not None and template.makes(last, values)

    def send(self, template: TaskTemplate, due_us: int, values: TaskValues) -> bool:
        """Publish a task with *template* (an encoded task message) and *values*.

        Returns False if the caller must call :meth:`publish` instead. After an error the task was
        not sent.
        """
        now_us = time_ns() // 1000
        if due_us <= now_us or now_us > template.valid_until_us:
            return False
        outbox = self.outbox
        with outbox.lock:  # else the other thread may lose the connection in between
            channel = outbox.channel
            if channel is None or channel.connection is None:  # publish() connects again
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
    """Makes random ids, 256 per request to the operating system. Not thread-safe."""

    def __init__(self) -> None:
        self._left: list[str] = []

    def hex(self) -> str:
        """Return 128 random bits as 32 hex digits."""
        if not self._left:
            many = token_bytes(16 * _IDS_AT_A_TIME).hex()
            self._left = [many[at : at + 32] for at in range(0, len(many), 32)]
        return self._left.pop()

    def uuid(self) -> str:
        """Return a UUID of version 4. https://www.rfc-editor.org/rfc/rfc9562#section-5.4"""
        bits = self.hex()
        variant = _UUID_VARIANTS[int(bits[16], 16) & 3]
        return f"{bits[:8]}-{bits[8:12]}-4{bits[13:16]}-{variant}{bits[17:20]}-{bits[20:]}"
