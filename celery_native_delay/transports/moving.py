"""The broker operations that ``delay migrate`` calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from ..due_time import due_us, eta_of, milliseconds_up
from ..errors import CannotDelay, InvalidDueTime, NoStore, UnsupportedBroker
from ..keyed.records import KeyRecords
from ..message import HEADER, Delayed, due_ms_of
from ..records.publishing import RecordedPublish
from ..records.waiting import HELD

#: Why a held task is not moved.
HELD_STAYS = "its task is held, and can be moved to a store only: release it first"


@dataclass(frozen=True)
class Moving:
    """A waiting message that ``delay migrate`` moves to another broker.

    - *properties*: the AMQP properties, including ``application_headers``
    - *again*: True if an earlier run of ``delay migrate`` may have moved the message
    """

    body: bytes
    properties: Mapping[str, Any]
    delayed: Delayed
    again: bool = False

    @property
    def headers(self) -> Mapping[str, Any]:
        return self.properties.get("application_headers") or {}

    @property
    def task_id(self) -> str | None:
        return task_id_of(self.headers, self.properties)

    def without(self, header: str) -> Moving:
        return self._with({name: self.headers[name] for name in self.headers if name != header})

    def as_plain(self) -> Moving:
        """Return the message without this package's headers; its ETA is the due time.

        Raises CannotDelay if no Celery worker would hold the message until its ETA, or if somebody
        holds the task.
        """
        if "task" not in self.headers:
            raise CannotDelay(
                "expected a Celery task of task_protocol 2, got another message: plain consumers "
                "ignore its ETA, so let it wait until it is due, or cancel it"
            )
        if HELD in self.headers:
            raise CannotDelay(HELD_STAYS)
        own = {name: self.headers[name] for name in self.headers if not name.startswith(HEADER)}
        if due_ms_of(own) != milliseconds_up(self.delayed.due_us):
            own["eta"] = eta_of(self.delayed.due_us)
        return self._with(own)

    def _with(self, headers: Mapping[str, Any]) -> Moving:
        return replace(self, properties={**self.properties, "application_headers": headers})


@dataclass(frozen=True)
class Stays:
    """A message that ``delay migrate`` leaves on the old broker.

    *why* is the reason. If *is_error* is True, the command reports an error.
    """

    why: str
    is_error: bool = True


@dataclass(frozen=True)
class Void:
    """A message that must not run, so that a move deletes it."""


Found = Moving | Stays | Void


class Source(ABC):
    """A queue or database from which ``delay migrate`` takes waiting messages."""

    name: str

    keeps_keys = True
    """True if a moved message keeps the debounce, throttle or unique key."""

    def key_records(self) -> KeyRecords | None:
        """Return the storage of debounce, throttle and unique keys; None if there is no storage."""
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
        """Delete the message that :meth:`found` yielded last.

        Returns False, and deletes nothing, if the message has changed since then.
        """

    def close(self) -> None:  # noqa: B027  nothing to do where nothing is held
        """Unlock the message that :meth:`found` yielded last."""


class MovingPart(ABC):
    """The broker operations that ``delay migrate`` calls."""

    name: str
    """The name of the queues or database to which ``delay migrate`` moves messages."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def prepare(self, queues: Sequence[Any]) -> None:
        """Declare the app's *queues*; subclasses also create the queues or tables for delays."""
        for queue in queues:
            queue(self._channel).declare()

    @abstractmethod
    def own_sources(self) -> list[Source]:
        """Return the app's own waiting messages, for ``delay uninstall``."""

    @abstractmethod
    def sources(self, what: str | None) -> list[Source]:
        """Return the queues or databases from which ``delay migrate`` takes waiting messages.

        *what* is the value of the option ``--from``, or None if the value is a URL. Raises
        UnsupportedBroker if this broker does not support the value.
        """

    def key_records(self) -> KeyRecords | None:
        """Return the storage of debounce, throttle and unique keys; None if there is no storage."""
        try:
            return KeyRecords(self._channel.records(self._channel.delays.settings))
        except (NoStore, UnsupportedBroker):
            return None

    @abstractmethod
    def take_in(self, moving: Moving, keyed: RecordedPublish | None = None) -> bool:
        """Publish a moved message on this broker; return False if the broker may have two copies.

        In a draining app, this method publishes a plain task with an ETA.

        If *keyed* is given, this method also stores the state of the task's debounce, throttle or
        unique key.

        Raises:
            NativeDelayError: the message cannot wait on this broker, and was not sent.
            NotPublished: another task already has the debounce, throttle or unique key.
        """


def task_id_of(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> str | None:
    """Return the task id: header ``id`` in Celery's protocol 2, else the correlation id."""
    if "task" in headers:
        return headers.get("id")
    return properties.get("correlation_id")


def derived_id(
    headers: Mapping[str, Any], properties: Mapping[str, Any], body: bytes, *where: object
) -> str | None:
    """Return a delivery id, hashed from message and destination (*where*); None without task id."""
    task_id = task_id_of(headers, properties)
    if not task_id:
        return None
    told = "\0".join(map(str, (task_id, headers.get("retries", 0), headers.get("eta"), *where)))
    return sha256(told.encode() + b"\0" + body).hexdigest()[:32]


def expires_ms_of(properties: Mapping[str, Any], *, now_us: int) -> int | None:
    """Return a message's expiry in milliseconds since the epoch; None without an expiration."""
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
