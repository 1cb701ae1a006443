"""The interface of transports for ``delay migrate`` and ``delay prune``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, NamedTuple

from ..due_time import due_us
from ..errors import InvalidDueTime, UnsupportedBroker
from ..keyed.records import KeyRecords
from ..message import Delayed
from ..records.publishing import RecordedPublish


@dataclass(frozen=True)
class Moving:
    """A waiting message that ``delay migrate`` moves, with its properties and body as published.

    AMQP's *properties* contain the headers (``application_headers``). *again* is True if an earlier
    run may already have moved the message. *known* is True if the task records list the message.
    """

    body: bytes
    properties: Mapping[str, Any]
    delayed: Delayed
    again: bool = False
    known: bool = False

    @property
    def headers(self) -> Mapping[str, Any]:
        return self.properties.get("application_headers") or {}

    @property
    def task_id(self) -> str | None:
        return task_id_of(self.headers, self.properties)

    def without(self, header: str) -> Moving:
        """Return a copy of the message without *header*."""
        if header not in self.headers:
            return self
        headers = {name: value for name, value in self.headers.items() if name != header}
        return replace(self, properties={**self.properties, "application_headers": headers})


@dataclass(frozen=True)
class Stays:
    """A message that ``delay migrate`` does not move; *should* is True if this is a failure."""

    why: str
    should: bool = True


@dataclass(frozen=True)
class Void:
    """A message that no worker would run, because its task was cancelled or rescheduled."""


Found = Moving | Stays | Void


class Source(ABC):
    """A queue or database from which ``delay migrate`` takes waiting messages."""

    name: str

    keeps_keys = True
    """True if moved messages keep their debounce, throttle or unique key."""

    def key_records(self) -> KeyRecords | None:
        """Return the stored debounce, throttle and unique keys; None if they are unknown."""
        return None

    @abstractmethod
    def count(self) -> int:
        """Return the approximate number of waiting messages in this source."""

    @abstractmethod
    def found(self) -> Iterator[Found]:
        """Yield each waiting message, locked until the caller asks for the next message.

        Only :meth:`done` deletes a message from this source.
        """

    @abstractmethod
    def done(self) -> bool:
        """Delete the last message of :meth:`found`; return False if the message has changed."""

    def close(self) -> None:  # noqa: B027  nothing to do where nothing is held
        """Unlock the last message. If :meth:`done` was not called, the message stays."""


class Reach(NamedTuple):
    """A binding of one of the app's queues; in the default exchange, the queue's name."""

    exchange: str
    kind: str
    routing_key: str
    queue: str


class MovingPart(ABC):
    """Moves waiting messages from and to one broker, on one channel."""

    name: str
    """The name of the place into which ``delay migrate`` moves messages."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def prepare(self, queues: Sequence[Any]) -> None:
        """Create everything that delays need on the broker, and declare the app's *queues*."""
        for queue in queues:
            queue(self._channel).declare()

    @abstractmethod
    def sources(self, what: str | None, reaches: Sequence[Reach]) -> list[Source]:
        """Return the sources that the option ``--from`` names; for None, the default sources.

        Raises UnsupportedBroker if this broker has no such source.
        """

    def key_records(self) -> KeyRecords | None:
        """Return the stored debounce, throttle and unique keys; None if there are none."""
        try:
            return KeyRecords(self._channel.records(self._channel.delays.settings))
        except UnsupportedBroker:
            return None

    @abstractmethod
    def take_in(self, moving: Moving, keyed: RecordedPublish | None = None) -> bool:
        """Publish a moved message to wait on this broker; return False if a copy may exist too.

        Raises:
            NativeDelayError: the message cannot wait on this broker, and was not sent.
            NotPublished: another task already has the message's key; the message was not sent.
        """


@dataclass(frozen=True)
class Remnant:
    """Queues and exchanges of former settings or of Celery's own delayed delivery.

    *waiting* counts the messages in these queues. *bindings* are Celery's own bindings.
    """

    name: str
    waiting: int
    queues: int
    exchanges: int
    bindings: tuple[str, ...] = ()


def task_id_of(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> str | None:
    """Return a message's task id; without a task, the message's correlation id."""
    if "task" in headers:
        return headers.get("id")
    return properties.get("correlation_id")


def derived_id(
    headers: Mapping[str, Any], properties: Mapping[str, Any], body: bytes, *where: object
) -> str | None:
    """Compute a message's delivery id from the message and its place, equal at each reading.

    Returns None if the message has no task id.
    """
    task_id = task_id_of(headers, properties)
    if not task_id:
        return None
    told = "\0".join(map(str, (task_id, headers.get("retries", 0), headers.get("eta"), *where)))
    return sha256(told.encode() + b"\0" + body).hexdigest()[:32]


def expires_ms_of(properties: Mapping[str, Any], *, now_us: int) -> int | None:
    """Return the time at which a message expires, in ms since the epoch, or None."""
    expiration = properties.get("expiration")
    if expiration is None or not str(expiration).isdecimal():
        return None
    expires = (properties.get("application_headers") or {}).get("expires")
    try:
        if expires:
            return due_us(expires) // 1000
    except InvalidDueTime:
        pass
    return now_us // 1000 + int(expiration)
