"""The questions of workers, the command line and ``bulk(app)`` to any transport.

A channel that can delay has ``worker_part(settings)`` and ``admin_part(settings)``. Its transport
has ``bulk_publisher(window=…)``. So no caller needs to know which broker it talks to.
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
    """A received message that a worker puts back into the broker, to wait there until *due_us*.

    *message* is kombu's. It returns to *queue* alone, from which it was consumed. *due_us* is in
    microseconds since the epoch. *delivery_id* None makes a new one; *headers* are added.
    """

    message: Any
    queue: str
    due_us: int
    delivery_id: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)

    def on(self, message: dict[str, Any]) -> dict[str, Any]:
        """A copy of kombu's *message* with :attr:`headers` added; for virtual transports."""
        if not self.headers:
            return message
        return {**message, "headers": {**(message.get("headers") or {}), **self.headers}}

    @cached_property
    def new_id(self) -> str:
        """A new delivery id; the same at every attempt to put this message back."""
        return token_hex(16)


@dataclass
class Rescue:
    """The numbers of parked messages that one rescue delivered, put back, dropped and left."""

    delivered: int = 0
    waiting_again: int = 0
    expired: int = 0
    still_parked: int = 0

    @property
    def rescued(self) -> int:
        """The number of messages that are no longer parked."""
        return self.delivered + self.waiting_again + self.expired

    def __str__(self) -> str:
        return (
            f"{self.delivered} parked message(s) delivered, {self.waiting_again} waiting again, "
            f"{self.expired} expired, {self.still_parked} still parked"
        )


class WorkerPart(ABC):
    """The tasks of a worker for its broker besides consuming, on a channel of its own."""

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        self.settings = settings
        self._channel = channel
        self._delays = channel.delays

    comes_back_late_seconds = 0.05
    """Seconds by which a message that was put back returns late at most, on a healthy broker."""

    @abstractmethod
    def prepare(self, where: str) -> str:
        """Make the broker ready for consuming; return the sentence that the worker logs.

        *where* is the broker's URL without its password. Raises NativeDelayError, which says the
        way out, if delayed messages cannot wait on this broker.
        """

    @property
    def terms(self) -> str:
        """The end of the sentence that the worker logs at boot: longest delay, adopting."""
        longest = duration(self.settings.longest_delay_seconds)
        return f"longest delay {longest}; adopting {'on' if self.settings.adopt else 'off'}"

    def dangers(self) -> list[Finding]:
        """Settings of the broker by which delayed messages may be lost or come early.

        Raises ManagementUnavailable.
        """
        return []

    def put_back(self, waits: Sequence[Wait]) -> list[NativeDelayError | None]:
        """Put messages back into the broker; return an error for each, None if it was put back."""
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
        """Put a message back into the broker. Raises NativeDelayError if it cannot wait there."""

    def rescue(self) -> Rescue | None:
        """Deliver the parked messages that can be; None if another process is doing it.

        Raises NotPermitted.
        """
        return Rescue()

    def promoter(self, connect: Callable[..., Any]) -> Promoter | None:
        """A loop that delivers due messages; None if the broker delivers them by itself.

        *connect* makes kombu connections, given their ``transport_options``.
        """
        return None

    def receipts(self) -> Receipts | None:
        """The records to ask about every message that waited; None if no records are kept."""
        return None

    def sweep(self) -> int:
        """Delete the records of messages that were lost long ago; return their number."""
        return 0


class Promoter(Protocol):
    """A loop that delivers due messages; *promoted* and *parked* count them."""

    promoted: int
    parked: int

    def run(self) -> None: ...

    def stop(self) -> None:
        """End :meth:`run` soon; from any thread or signal handler."""


@runtime_checkable
class ServesQueues(Protocol):
    """A worker or admin part of a broker that keeps something for every queue."""

    def serve(self, queues: Sequence[str]) -> None:
        """Create or watch what the broker needs for the queues with these names."""


class Answer(Enum):
    """The answer of the records to the question whether a worker may run a message."""

    RUN = "run"
    DROP = "drop"
    """The task was cancelled or rescheduled: another message replaced this one."""
    AWAY = "away"
    """The records are unreachable."""


class Receipts(Protocol):
    """The records, as a worker asks them about every message that waited."""

    def may_run(self, headers: Mapping[str, Any], delayed: Delayed) -> Answer:
        """The answer for a message with these *headers* that waited as *delayed* says."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class ParkedTask:
    """A parked message: task name and id, destination and due time (ISO 8601), where known."""

    task: str | None
    id: str | None
    exchange: str | None
    routing_key: str | None
    due: str | None

    @classmethod
    def of(cls, headers: Mapping[str, Any], delayed: Delayed | None) -> ParkedTask:
        """The parked task with these *headers*; *delayed* is None if it lost our header."""
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
        """The report for ``--json``."""

    def lines(self, table: Callable[[tuple[str, ...], list[tuple[Any, ...]]], str]) -> list[str]:
        """The lines of the report for people; *table* aligns columns under headings."""


@dataclass(frozen=True)
class Told:
    """A report: *facts* for ``--json``, *sentences* for people."""

    facts: Mapping[str, Any]
    sentences: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        return dict(self.facts)

    def lines(self, table: Callable[..., str]) -> list[str]:
        return list(self.sentences)


@dataclass(frozen=True)
class Level:
    """A level queue of RabbitMQ: its name, its TTL, and how many messages wait in it."""

    name: str
    ttl_seconds: float
    waiting: int


@dataclass(frozen=True)
class Backlog:
    """The numbers of messages that wait, and that are parked, on a broker.

    *records_answer* is False if the records are unreachable, None if none are kept. *in_records*
    counts the waiting messages that the records list. *until_first_us* are the microseconds until
    the first one is due, negative if it is overdue. Both are None where they are not known.
    """

    waiting: int
    parked: int
    levels: tuple[Level, ...] = ()
    records_answer: bool | None = None
    until_first_us: int | None = None
    in_records: int | None = None


class AdminPart(Protocol):
    """The questions of the command line to a broker."""

    name: str
    """The name of the place where messages wait, such as ``celery_delay.v1.31x125ms.quorum``."""
    parking: str
    """The name of the place where parked messages lie."""

    def declare(self, queues: Sequence[Any]) -> Report:
        """Declare what delayed messages need; *queues* are the app's."""

    def verify(self) -> list[Finding]:
        """Compare the broker with what delays need: declarations, their arguments, policies.

        It declares nothing, and needs no worker.
        """

    def examine(self) -> list[Finding]:
        """Look for overdue, parked and stuck messages, promoters, records and clocks."""

    def status(self) -> Report:
        """Count waiting and parked messages, by the broker and by the records, if any.

        It may take as long as the records' timeout.
        """

    def backlog(self) -> Backlog:
        """Count waiting and parked messages, quickly enough for a call every few seconds."""

    def purge(self) -> int:
        """Delete all waiting messages; return their number."""

    def parked(self, *, limit: int) -> tuple[int, list[ParkedTask]] | None:
        """The number of parked messages, and the first *limit*; None while a worker rescues."""

    def requeue(self) -> Rescue | None:
        """Rescue parked messages now; None while a worker rescues."""

    def purge_parked(self) -> int:
        """Delete all parked messages; return their number."""


@runtime_checkable
class ExpectsQueues(Protocol):
    """An admin part that also checks what the app's queues need."""

    def expect(self, queues: Sequence[Any]) -> None:
        """Note *queues*, the app's, for :meth:`AdminPart.verify`."""


def lines_of(channel: Any, settings: DelaySettings) -> Lines:
    """The queues of rate-limited tasks beside the broker of *channel*. Raises NoRecords."""
    if not hasattr(channel, "lines"):
        raise NoRecords(
            "native_delay_rates has no place to count tasks beside this broker: use Redis or a "
            "database as the broker, or RabbitMQ, SQS or pgmq with native_delay_records"
        )
    lines: Lines = channel.lines(settings)
    return lines


#: The way out on a broker without a place for the records of keys.
WHERE_KEYS_ARE_KEPT = (
    "debounce, throttle and unique keep records of their keys beside the waiting messages: "
    "use a Redis broker, RabbitMQ, SQS or pgmq with native_delay_records set, a sqla+… broker, or "
    "one whose messages wait in native_delay_store"
)


def without_records(channel: Any) -> UnsupportedBroker:
    """The error for a broker without a place for the records of keys."""
    where = channel.connection.client.as_uri()
    return UnsupportedBroker(f"{where} has no place for the records of keys: {WHERE_KEYS_ARE_KEPT}")
