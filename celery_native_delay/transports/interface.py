"""Define what every transport offers to workers, to the command line and to ``bulk(app)``.

A channel that can delay has ``worker_part(settings)`` and ``admin_part(settings)``. The channel's
transport has ``bulk_publisher(window=…)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from functools import cached_property
from secrets import token_hex
from typing import Any, Protocol, runtime_checkable

from ..durations import duration
from ..errors import NativeDelayError, NoRecords, UnsupportedBroker
from ..finding import Finding
from ..message import Delayed
from ..rates.line import Lines
from ..settings import DelaySettings


@dataclass(frozen=True)
class Wait:
    """A received message that a worker puts back into the broker until *due_us*.

    When due, kombu's *message* returns only to *queue*, from which it came. *due_us* is in
    microseconds since the epoch. A *delivery_id* of None makes a new delivery id.
    """

    message: Any
    queue: str
    due_us: int
    delivery_id: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)

    def on(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of kombu's *message* with :attr:`headers` added."""
        if not self.headers:
            return message
        return {**message, "headers": {**(message.get("headers") or {}), **self.headers}}

    @cached_property
    def new_id(self) -> str:
        """Return a new delivery id, the same at every attempt to put this message back."""
        return token_hex(16)


@dataclass
class Rescue:
    """Numbers of parked messages delivered, put back to wait, dropped as expired, left parked."""

    delivered: int = 0
    waiting_again: int = 0
    expired: int = 0
    still_parked: int = 0

    @property
    def rescued(self) -> int:
        """Return how many messages were delivered, put back to wait, or dropped as expired."""
        return self.delivered + self.waiting_again + self.expired

    def __str__(self) -> str:
        return (
            f"{self.delivered} parked message(s) delivered, {self.waiting_again} waiting again, "
            f"{self.expired} expired, {self.still_parked} still parked"
        )


class WorkerPart(ABC):
    """The duties of a worker for its broker besides consuming, on a separate channel."""

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        self.settings = settings
        self._channel = channel
        self._delays = channel.delays

    comes_back_late_seconds = 0.05
    """The longest lateness of a message that a worker put back, in seconds, on a healthy broker."""

    @abstractmethod
    def prepare(self, where: str) -> str:
        """Make the broker ready for consuming; return the sentence that the worker logs.

        *where* is the broker's URL without its password. Raises NativeDelayError, which says what
        to do, if delayed messages cannot wait on this broker.
        """

    @property
    def terms(self) -> str:
        """Return the end of the worker's log line at boot: longest delay, adopting on or off."""
        longest = duration(self.settings.longest_delay_seconds)
        return f"longest delay {longest}; adopting {'on' if self.settings.adopt else 'off'}"

    def dangers(self) -> list[Finding]:
        """Return findings about broker settings that may lose messages or deliver early.

        Raises ManagementUnavailable if the management API does not answer.
        """
        return []

    def put_back(self, waits: Sequence[Wait]) -> list[NativeDelayError | None]:
        """Put messages back to wait; return one item per message: an error, or None."""
        refusals: list[NativeDelayError | None] = []
        for wait in waits:
            try:
                self.put_one_back(wait)
                refusals.append(None)
            except NativeDelayError as exc:
                refusals.append(exc)
        return refusals

    @abstractmethod
    def put_one_back(self, wait: Wait) -> None:
        """Put one message back to wait. Raises NativeDelayError if it cannot wait there."""

    def rescue(self) -> Rescue | None:
        """Publish parked messages (due, but undeliverable so far) again.

        Returns None if another process does this now. Raises NotPermitted if the broker user lacks
        a permission.
        """
        return Rescue()

    def promoter(self, connect: Callable[..., Any]) -> Promoter | None:
        """Return a loop that moves due messages; None if the broker itself delivers them.

        *connect* takes ``transport_options`` and returns a kombu connection.
        """
        return None

    def receipts(self) -> Receipts | None:
        """Return the object that tells if a message may run; None if the app keeps no records."""
        return None

    def sweep(self) -> int:
        """Delete the records of waiting messages lost long ago; return their number."""
        return 0


class Promoter(Protocol):
    """A loop that moves due messages into their queues, and parks undeliverable messages."""

    promoted: int
    parked: int

    def run(self) -> None: ...

    def stop(self) -> None:
        """Make :meth:`run` return soon. Any thread or signal handler may call this."""


@runtime_checkable
class ServesQueues(Protocol):
    """A WorkerPart or AdminPart of a broker that needs the names of the app's queues."""

    def serve(self, queues: Sequence[str]) -> None:
        """Create or watch what the broker needs to delay messages for the named queues."""


class Answer(Enum):
    """The records' answer to a worker that asks whether a message may run."""

    RUN = "run"
    DROP = "drop"
    """The worker drops the message: its task was cancelled, or rescheduled as another message."""
    AWAY = "away"
    """The records (state about waiting tasks, in Redis or a database) are unreachable."""


class Receipts(Protocol):
    """Tells a worker, from the records of waiting tasks, whether a message that waited may run."""

    def may_run(self, headers: Mapping[str, Any], delayed: Delayed) -> Answer:
        """Answer whether the message with these *headers* may run; *delayed* describes its wait."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class ParkedTask:
    """A parked (due, but undeliverable) task: name, id, destination, due time; None if unknown."""

    task: str | None
    id: str | None
    exchange: str | None
    routing_key: str | None
    due: str | None

    @classmethod
    def of(cls, headers: Mapping[str, Any], delayed: Delayed | None) -> ParkedTask:
        """Return the parked task with these *headers*; *delayed* describes its wait, if known."""
        task, task_id = headers.get("task"), headers.get("id")
        if delayed is None:
            return cls(task, task_id, None, None, None)
        due = datetime.fromtimestamp(delayed.due_us / 1_000_000, UTC).isoformat(
            timespec="milliseconds"
        )
        return cls(task, task_id, delayed.exchange, delayed.routing_key, due)


class Report(Protocol):
    """A report that a command prints."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as data for ``--json``."""

    def lines(self, table: Callable[[tuple[str, ...], list[tuple[Any, ...]]], str]) -> list[str]:
        """Return the lines of the report for people; *table* aligns columns under headings."""


@dataclass(frozen=True)
class Told:
    """A report made of *facts* for ``--json`` and *sentences* for people."""

    facts: Mapping[str, Any]
    sentences: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        return dict(self.facts)

    def lines(self, table: Callable[..., str]) -> list[str]:
        return list(self.sentences)


@dataclass(frozen=True)
class Level:
    """One delay level (a queue with a TTL) of RabbitMQ: its name, TTL, and number of messages."""

    name: str
    ttl_seconds: float
    waiting: int


@dataclass(frozen=True)
class Backlog:
    """The numbers of waiting and parked (due, but undeliverable) messages on a broker.

    *records_answer* is False if the records of waiting tasks are unreachable, and None if the app
    keeps none. *until_first_us* is the time in microseconds until the first message is due,
    negative if it is overdue. *in_records* counts the waiting messages in the records. Unknown
    numbers are None.
    """

    waiting: int
    parked: int
    levels: tuple[Level, ...] = ()
    records_answer: bool | None = None
    until_first_us: int | None = None
    in_records: int | None = None


class AdminPart(Protocol):
    """A broker's answers to the command line."""

    name: str
    """The name of the place where messages wait, such as ``celery_delay.v1.31x125ms.quorum``."""
    parking: str
    """The name of the place that holds parked (due, but undeliverable) messages."""

    def declare(self, queues: Sequence[Any]) -> Report:
        """Declare what delayed messages need; *queues* are the app's queues."""

    def verify(self) -> list[Finding]:
        """Compare declarations and policies of the broker with the needs of delays."""

    def examine(self) -> list[Finding]:
        """Look for problems: overdue or parked messages, wrong clocks, lost records."""

    def status(self) -> Report:
        """Count waiting and parked messages; may take as long as the records' timeout."""

    def backlog(self) -> Backlog:
        """Count waiting and parked messages, quickly enough for a call every few seconds."""

    def purge(self) -> int:
        """Delete all waiting messages; return how many were deleted."""

    def parked(self, *, limit: int) -> tuple[int, list[ParkedTask]] | None:
        """Return number and first *limit* of parked messages; None while a worker retries them."""

    def requeue(self) -> Rescue | None:
        """Publish parked messages again; return None while a worker already does so."""

    def purge_parked(self) -> int:
        """Delete all parked messages; return how many were deleted."""


@runtime_checkable
class ExpectsQueues(Protocol):
    """An AdminPart that also checks what the app's queues need."""

    def expect(self, queues: Sequence[Any]) -> None:
        """Tell :meth:`AdminPart.verify` which queues the app has."""


def lines_of(channel: Any, settings: DelaySettings) -> Lines:
    """Return the queues of rate-limited tasks. Raises NoRecords if the app keeps no records."""
    if not hasattr(channel, "lines"):
        raise NoRecords(
            "native_delay_rates has no place to count tasks beside this broker: use Redis or a "
            "database as the broker, or RabbitMQ, SQS or pgmq with native_delay_records"
        )
    lines: Lines = channel.lines(settings)
    return lines


#: The advice for a broker that has no place for debounce, throttle and unique keys.
WHERE_KEYS_ARE_KEPT = (
    "debounce, throttle and unique keep records of their keys beside the waiting messages: "
    "use a Redis broker, RabbitMQ, SQS or pgmq with native_delay_records set, a sqla+… broker, or "
    "one whose messages wait in native_delay_store"
)


def without_records(channel: Any) -> UnsupportedBroker:
    """Return the error for a broker that has no place for debounce, throttle and unique keys."""
    where = channel.connection.client.as_uri()
    return UnsupportedBroker(f"{where} has no place for the records of keys: {WHERE_KEYS_ARE_KEPT}")
