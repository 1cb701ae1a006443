"""Define a transport's part in ``delay migrate`` and ``delay prune``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, NamedTuple

from ..due_time import due_us
from ..errors import InvalidDueTime, UnsupportedBroker
from ..keyed.publishing import KeyedPublish
from ..keyed.records import KeyRecords
from ..message import Delayed


@dataclass(frozen=True)
class Moving:
    """A waiting message that ``delay migrate`` moves, with the properties and body as published.

    AMQP's *properties* have the headers under ``application_headers``. *again* is True if an
    interrupted run may already have moved the message. *known* is True if the records list it.
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
    """A message that ``delay migrate`` leaves, and why; *should* is True if that is a failure."""

    why: str
    should: bool = True


@dataclass(frozen=True)
class Void:
    """A message that no worker would run, because its task was cancelled or rescheduled."""


Found = Moving | Stays | Void


class Source(ABC):
    """A place from which ``delay migrate`` takes waiting messages."""

    name: str

    keeps_keys = True
    """True if moved messages keep their debounce, throttle or unique key."""

    def key_records(self) -> KeyRecords | None:
        """Return the records of debounce, throttle and unique keys; None if unknown."""
        return None

    @abstractmethod
    def count(self) -> int:
        """Return roughly how many messages wait in this place, without taking any message."""

    @abstractmethod
    def found(self) -> Iterator[Found]:
        """Yield each waiting message, locked until the caller asks for the next one.

        The message stays in this place unless the caller calls :meth:`done` first.
        """

    @abstractmethod
    def done(self) -> bool:
        """Delete the message that :meth:`found` yielded last; return False if it changed."""

    def close(self) -> None:  # noqa: B027  nothing to do where nothing is held
        """Unlock the last message, if it was not deleted, so that it stays in this place."""


class Reach(NamedTuple):
    """A binding of one of the app's queues, or a queue's own name in the default exchange."""

    exchange: str
    kind: str
    routing_key: str
    queue: str


class MovingPart(ABC):
    """A transport's part in moving waiting messages, on one channel."""

    name: str
    """The name of the place into which ``delay migrate`` moves messages."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def prepare(self, queues: Sequence[Any]) -> None:
        """Declare what delayed messages need, and declare the app's *queues*."""
        for queue in queues:
            queue(self._channel).declare()

    @abstractmethod
    def sources(self, what: str | None, reaches: Sequence[Reach]) -> list[Source]:
        """Return the places that ``--from`` *what* names; the default places for None.

        Raises UnsupportedBroker if this broker has no such place.
        """

    def key_records(self) -> KeyRecords | None:
        """Return the records of debounce, throttle and unique keys; None if there are none."""
        try:
            return KeyRecords(self._channel.records(self._channel.delays.settings))
        except UnsupportedBroker:
            return None

    @abstractmethod
    def take_in(self, moving: Moving, keyed: KeyedPublish | None = None) -> bool:
        """Publish a message to wait here, confirmed; return False if a copy may be here too.

        Raises:
            NativeDelayError: the message cannot wait here, and was not sent.
            AnotherStands: another task already has the message's key, and it was not sent.
        """


@dataclass(frozen=True)
class Remnant:
    """Queues and exchanges of former settings or of Celery's own delayed delivery.

    *waiting* counts the messages still there. Celery added *bindings* to the user's exchanges.
    """

    name: str
    waiting: int
    queues: int
    exchanges: int
    bindings: tuple[str, ...] = ()


def task_id_of(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> str | None:
    """Return the task id of a Celery task, or else the message's correlation id."""
    if "task" in headers:
        return headers.get("id")
    return properties.get("correlation_id")


def derived_id(
    headers: Mapping[str, Any], properties: Mapping[str, Any], body: bytes, *where: object
) -> str | None:
    """Return a delivery id that is the same at each reading of the message from *where*.

    Returns None without a task id: two such messages may be equal, and both are wanted.
    """
    task_id = task_id_of(headers, properties)
    if not task_id:
        return None
    told = "\0".join(map(str, (task_id, headers.get("retries", 0), headers.get("eta"), *where)))
    return sha256(told.encode() + b"\0" + body).hexdigest()[:32]


def expires_ms_of(properties: Mapping[str, Any], *, now_us: int) -> int | None:
    """Return when a message's ``expiration`` ends, in ms since the epoch, or None."""
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
