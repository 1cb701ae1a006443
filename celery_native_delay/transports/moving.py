"""Messages that wait in one place and are to be moved to another: what they are, and what a place
must be able to do; and what is left of a place. The loop is in ``app/moving.py``.
"""

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
    """A message as it was published, and the wait that it is to have in another place.

    *properties* are AMQP's, with the headers under ``application_headers``. With *again* the other
    place may have it already: a run was interrupted. One that is *known* stands in the records as
    it is.
    """

    body: bytes
    properties: Mapping[str, Any]
    delayed: Delayed
    again: bool = False
    known: bool = False

    @property
    def headers(self) -> Mapping[str, Any]:
        """The user's headers."""
        return self.properties.get("application_headers") or {}

    @property
    def task_id(self) -> str | None:
        """The id of a Celery task; None for any other message."""
        return task_id_of(self.headers, self.properties)

    def without(self, header: str) -> Moving:
        """The message without one of its headers."""
        if header not in self.headers:
            return self
        headers = {name: value for name, value in self.headers.items() if name != header}
        return replace(self, properties={**self.properties, "application_headers": headers})


@dataclass(frozen=True)
class Stays:
    """A message that is left where it is, and why; one that *should* have been moved, or not."""

    why: str
    should: bool = True


@dataclass(frozen=True)
class Void:
    """A message that no worker would run: its task was cancelled, or moved, by another one."""


Found = Moving | Stays | Void


class Source(ABC):
    """A place in which messages wait."""

    name: str

    keeps_keys = True
    """True if a message that is moved keeps the record of its key, and its place in a line."""

    def key_records(self) -> KeyRecords | None:
        """The records of keys of its messages; None if they are not known."""
        return None

    @abstractmethod
    def count(self) -> int:
        """Number of messages there, as far as it can tell without disturbing any."""

    @abstractmethod
    def found(self) -> Iterator[Found]:
        """Each message that is there when it is come to.

        The one that was found last is this process's own until the next; it stays, unless
        :meth:`done` is called before.
        """

    @abstractmethod
    def done(self) -> bool:
        """Remove the message that was found last; False if it changed meanwhile."""

    def close(self) -> None:  # noqa: B027  nothing to do where nothing is held
        """Leave all that stays as it was."""


class Reach(NamedTuple):
    """A binding of the app's queues, which a message may be meant for."""

    exchange: str
    kind: str
    routing_key: str
    queue: str


class MovingPart(ABC):
    """The part of a transport that messages are moved from, or to; on one channel."""

    name: str
    """The place that messages are moved into."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def prepare(self, queues: Sequence[Any]) -> None:
        """Declare what messages need to wait, and *queues*, the app's."""
        for queue in queues:
            queue(self._channel).declare()

    @abstractmethod
    def sources(self, what: str | None, reaches: Sequence[Reach]) -> list[Source]:
        """The places named *what*, such as ``celery``; None: all that wait on this broker.

        Raises:
            UnsupportedBroker: there is no such place on this broker.
        """

    def key_records(self) -> KeyRecords | None:
        """The records of keys here; None if none can be kept."""
        try:
            return KeyRecords(self._channel.records(self._channel.delays.settings))
        except UnsupportedBroker:
            return None

    @abstractmethod
    def take_in(self, moving: Moving, keyed: KeyedPublish | None = None) -> bool:
        """Let a message wait here; it is here for sure when this returns. False: perhaps twice.

        Raises:
            NativeDelayError: it cannot; it was not sent.
            AnotherStands: as *keyed* has it; it was not sent.
        """


@dataclass(frozen=True)
class Remnant:
    """Declarations on a broker that nothing is published to any more.

    *waiting* messages are still in it. *bindings* are those that were added to others' exchanges.
    """

    name: str
    waiting: int
    queues: int
    exchanges: int
    bindings: tuple[str, ...] = ()


def task_id_of(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> str | None:
    """The id of a Celery task, in protocol 1 its correlation id; None for any other message."""
    if "task" in headers:
        return headers.get("id")
    return properties.get("correlation_id")


def derived_id(
    headers: Mapping[str, Any], properties: Mapping[str, Any], body: bytes, *where: object
) -> str | None:
    """A delivery id that a message has again when it is found again *where* it was.

    None for one without the id of a task: such may be alike, and yet be meant several times.
    """
    task_id = task_id_of(headers, properties)
    if not task_id:
        return None
    told = "\0".join(map(str, (task_id, headers.get("retries", 0), headers.get("eta"), *where)))
    return sha256(told.encode() + b"\0" + body).hexdigest()[:32]


def expires_ms_of(properties: Mapping[str, Any], *, now_us: int) -> int | None:
    """The end of a message's ``expiration``, which Celery has in a header, too.

    Milliseconds since the epoch; None for a message without one.
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
