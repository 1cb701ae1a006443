"""The interface of all transports for workers, the command line and ``bulk(app)``.

A channel that can delay messages has the methods ``worker_part(settings)`` and
``admin_part(settings)``. The channel's transport has the method ``bulk_publisher(window=…)``.
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
    """An early message that a worker puts back into the broker until the due time.

    At the due time, *message* returns only to *queue*, where the worker received it. *due_us* is in
    microseconds since the epoch. Without *delivery_id*, the message gets a new id.
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
        """Return a new delivery id for this message; repeated attempts use the same id."""
        return token_hex(16)


@dataclass
class Rescue:
    """Counts of parked (due, but undeliverable) messages after another delivery attempt."""

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
    """A worker's operations on its broker besides consuming, on a separate channel."""

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        self.settings = settings
        self._channel = channel
        self._delays = channel.delays

    comes_back_late_seconds = 0.05
    """The longest lateness of a message that a worker put back, in seconds, on a healthy broker."""

    @abstractmethod
    def prepare(self, where: str) -> str:
        """Prepare the broker for delayed messages; return a sentence for the worker's log.

        *where* is the broker URL without the password. Raises NativeDelayError if delayed messages
        cannot wait on this broker.
        """

    @property
    def terms(self) -> str:
        """Return the end of the worker's log line at startup, such as the longest delay."""
        longest = duration(self.settings.longest_delay_seconds)
        return f"longest delay {longest}; adopting {'on' if self.settings.adopt else 'off'}"

    def dangers(self) -> list[Finding]:
        """Return findings about broker settings that may lose messages or deliver early.

        Raises ManagementUnavailable if RabbitMQ's management API does not answer.
        """
        return []

    def put_back(self, waits: Sequence[Wait]) -> list[NativeDelayError | None]:
        """Put early messages back to wait; return an error or None for each message."""
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
        """Put one early message back to wait. Raises NativeDelayError if that is impossible."""

    def rescue(self) -> Rescue | None:
        """Publish parked messages (due, but undeliverable so far) again.

        Returns None if another process is already doing so. Raises NotPermitted if the broker user
        lacks a permission.
        """
        return Rescue()

    def promoter(self, connect: Callable[..., Any]) -> Promoter | None:
        """Return a loop that moves due messages to their queues; None if the broker does so.

        The function *connect* takes ``transport_options`` and returns a kombu connection.
        """
        return None

    def receipts(self) -> Receipts | None:
        """Return the check for cancelled tasks; None if the app keeps no task records."""
        return None

    def sweep(self) -> int:
        """Delete old records of lost messages; return the number of deleted records."""
        return 0


class Promoter(Protocol):
    """A loop that moves due messages to their queues, and sets undeliverable messages aside."""

    promoted: int
    parked: int

    def run(self) -> None: ...

    def stop(self) -> None:
        """Make :meth:`run` return soon. Any thread or signal handler may call this method."""


@runtime_checkable
class ServesQueues(Protocol):
    """A WorkerPart or AdminPart that needs the names of the app's queues."""

    def serve(self, queues: Sequence[str]) -> None:
        """Prepare the broker to delay messages for the named queues."""


class Answer(Enum):
    """The answer to a worker that asks whether a delayed message may run."""

    RUN = "run"
    DROP = "drop"
    """The worker drops the message: its task was cancelled, or rescheduled as another message."""
    AWAY = "away"
    """The records (state about waiting tasks, in Redis or a database) are unreachable."""


class Receipts(Protocol):
    """Decides, from the records of waiting tasks, whether a delayed message may run."""

    def may_run(self, headers: Mapping[str, Any], delayed: Delayed) -> Answer:
        """Decide whether the message with these *headers* may run."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class ParkedTask:
    """A parked task: due, but undeliverable. Unknown attributes are None."""

    task: str | None
    id: str | None
    exchange: str | None
    routing_key: str | None
    due: str | None

    @classmethod
    def of(cls, headers: Mapping[str, Any], delayed: Delayed | None) -> ParkedTask:
        """Return the parked (due, but undeliverable) task of a message with these *headers*."""
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
        """Return the report's lines for people; the function *table* formats rows as a table."""


@dataclass(frozen=True)
class Told:
    """A report with *facts* for ``--json`` and *sentences* for people."""

    facts: Mapping[str, Any]
    sentences: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        return dict(self.facts)

    def lines(self, table: Callable[..., str]) -> list[str]:
        return list(self.sentences)


@dataclass(frozen=True)
class Level:
    """One delay queue of RabbitMQ (a queue with a TTL): name, TTL and number of messages."""

    name: str
    ttl_seconds: float
    waiting: int


@dataclass(frozen=True)
class Backlog:
    """The numbers of waiting and parked (due, but undeliverable) messages on a broker.

    Unknown numbers are None. *in_records* counts the waiting messages in the task records.
    *records_answer* is False if the records are unreachable, and None if the app keeps no records.
    *until_first_us* is the time in microseconds until the first message is due; negative means
    overdue.
    """

    waiting: int
    parked: int
    levels: tuple[Level, ...] = ()
    records_answer: bool | None = None
    until_first_us: int | None = None
    in_records: int | None = None


class AdminPart(Protocol):
    """The operations of the ``delay`` commands on one broker."""

    name: str
    """The name of the place where messages wait, such as ``celery_delay.v1.31x125ms.quorum``."""
    parking: str
    """The name of the place that holds parked (due, but undeliverable) messages."""

    def declare(self, queues: Sequence[Any]) -> Report:
        """Create everything that delays need on the broker; *queues* are the app's queues."""

    def verify(self) -> list[Finding]:
        """Compare declarations and policies of the broker with the needs of delays."""

    def examine(self) -> list[Finding]:
        """Look for problems, such as overdue messages, wrong clocks and lost task records."""

    def status(self) -> Report:
        """Count waiting and parked (due, but undeliverable) messages, as a report."""

    def backlog(self) -> Backlog:
        """Count waiting and parked (due, but undeliverable) messages quickly, for monitoring."""

    def purge(self) -> int:
        """Delete all waiting messages; return how many were deleted."""

    def parked(self, *, limit: int) -> tuple[int, list[ParkedTask]] | None:
        """Return number and first *limit* of undeliverable messages; None during retries."""

    def requeue(self) -> Rescue | None:
        """Publish undeliverable messages again; return None if a worker is already doing so."""

    def purge_parked(self) -> int:
        """Delete all due but undeliverable messages; return how many were deleted."""


@runtime_checkable
class ExpectsQueues(Protocol):
    """An AdminPart that also checks the app's queues."""

    def expect(self, queues: Sequence[Any]) -> None:
        """Set the app's queues, which :meth:`AdminPart.verify` checks."""


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
    """Return the error for a broker that cannot store debounce, throttle and unique keys."""
    where = channel.connection.client.as_uri()
    return UnsupportedBroker(f"{where} has no place for the records of keys: {WHERE_KEYS_ARE_KEPT}")
