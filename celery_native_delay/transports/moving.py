"""The part of a transport in ``delay migrate`` and ``delay prune``; ``app/moving.py`` calls it."""

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
    """A waiting message that is moved to another broker or set of levels, as it was published.

    *properties* are AMQP's, with the headers under ``application_headers``. *again* is True if an
    interrupted run may have moved it before. *known* is True if the records list it already.
    """

    body: bytes
    properties: Mapping[str, Any]
    delayed: Delayed
    again: bool = False
    known: bool = False

    @property
    def headers(self) -> Mapping[str, Any]:
        """The headers of the message, as they were published."""
        return self.properties.get("application_headers") or {}

    @property
    def task_id(self) -> str | None:
        """The task id; None for a message that is no Celery task."""
        return task_id_of(self.headers, self.properties)

    def without(self, header: str) -> Moving:
        """A copy without one of its headers."""
        if header not in self.headers:
            return self
        headers = {name: value for name, value in self.headers.items() if name != header}
        return replace(self, properties={**self.properties, "application_headers": headers})


@dataclass(frozen=True)
class Stays:
    """A message that is not moved, and why; *should* is True if that is a failure."""

    why: str
    should: bool = True


@dataclass(frozen=True)
class Void:
    """A message that no worker would run: its task was cancelled or rescheduled."""


Found = Moving | Stays | Void


class Source(ABC):
    """A place from which waiting messages are moved."""

    name: str

    keeps_keys = True
    """True if moved messages keep the records of their keys, and their turn under a rate."""

    def key_records(self) -> KeyRecords | None:
        """The records of its messages' keys; None if they are not known."""
        return None

    @abstractmethod
    def count(self) -> int:
        """The number of waiting messages, as far as it is known without taking any."""

    @abstractmethod
    def found(self) -> Iterator[Found]:
        """Each waiting message, one at a time.

        It is locked until the next one is asked for. It stays in its place unless :meth:`done` is
        called before.
        """

    @abstractmethod
    def done(self) -> bool:
        """Delete the message that :meth:`found` gave last; False if it changed meanwhile."""

    def close(self) -> None:  # noqa: B027  nothing to do where nothing is held
        """Return the message that was not deleted to its place."""


class Reach(NamedTuple):
    """A binding of one of the app's queues, or the queue's own name in the default exchange."""

    exchange: str
    kind: str
    routing_key: str
    queue: str


class MovingPart(ABC):
    """A transport's part in moving waiting messages, on one channel."""

    name: str
    """The name of the place that messages are moved into."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def prepare(self, queues: Sequence[Any]) -> None:
        """Declare what delayed messages need, and *queues*, the app's."""
        for queue in queues:
            queue(self._channel).declare()

    @abstractmethod
    def sources(self, what: str | None, reaches: Sequence[Reach]) -> list[Source]:
        """The places that ``--from`` *what* names, such as ``celery``; None for the whole broker.

        Raises:
            UnsupportedBroker: there is no such place on this broker.
        """

    def key_records(self) -> KeyRecords | None:
        """The records of keys on this broker; None if it has no place for them."""
        try:
            return KeyRecords(self._channel.records(self._channel.delays.settings))
        except UnsupportedBroker:
            return None

    @abstractmethod
    def take_in(self, moving: Moving, keyed: KeyedPublish | None = None) -> bool:
        """Publish a message to wait here, confirmed; False if it may be here twice now.

        Raises:
            NativeDelayError: it cannot wait here, and was not sent.
            AnotherStands: another task has its key, and it was not sent.
        """


@dataclass(frozen=True)
class Remnant:
    """Queues and exchanges of former settings or of Celery's own delayed delivery.

    *waiting* counts the messages that are still in them. *bindings* are those that Celery added to
    the user's exchanges.
    """

    name: str
    waiting: int
    queues: int
    exchanges: int
    bindings: tuple[str, ...] = ()


def task_id_of(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> str | None:
    """The id of a Celery task; of another message its correlation id, which protocol 1 uses."""
    if "task" in headers:
        return headers.get("id")
    return properties.get("correlation_id")


def derived_id(
    headers: Mapping[str, Any], properties: Mapping[str, Any], body: bytes, *where: object
) -> str | None:
    """A delivery id that is the same each time the message is found *where* it waits.

    None for a message without a task id: two of them may be equal and yet both be wanted.
    """
    task_id = task_id_of(headers, properties)
    if not task_id:
        return None
    told = "\0".join(map(str, (task_id, headers.get("retries", 0), headers.get("eta"), *where)))
    return sha256(told.encode() + b"\0" + body).hexdigest()[:32]


def expires_ms_of(properties: Mapping[str, Any], *, now_us: int) -> int | None:
    """The end of a message's ``expiration``, in milliseconds since the epoch; None without one.

    Celery's header ``expires`` has the same time, more exactly.
    """
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
