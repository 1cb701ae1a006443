"""The broker operations that workers, ``celery delay`` commands and ``bulk(app)`` call.

A channel that can delay messages has the methods ``worker_part(settings)`` and
``admin_part(settings)``. The channel's transport has the method ``bulk_publisher(window=…)``;
*window* is the largest number of unconfirmed messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from secrets import token_hex
from typing import Any, Protocol

from ..durations import duration
from ..errors import NativeDelayError, NoStore
from ..finding import Finding
from ..message import HEADER, Delayed
from ..rates.in_records import RecordedLines
from ..settings import DelaySettings


@dataclass(frozen=True)
class Wait:
    """A message that a worker received before the due time, and returns to the broker.

    - *queue*: the only queue that gets the message at the due time
    - *due_us*: the due time, in microseconds since the epoch
    - *delivery_id*: the id that the message keeps; None if the message gets a new id
    - *headers*: additional headers for the message
    - *in_broker*: True if the message must not wait in a store, because the store does not answer
    """

    message: Any
    queue: str
    due_us: int
    delivery_id: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)
    in_broker: bool = False

    def on(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return *message*, as kombu received it, with the additional :attr:`headers`.

        It lacks the headers that the worker's checks have removed.
        """
        known = {HEADER, *self.message.headers}
        received = message.get("headers") or {}
        kept = {name: value for name, value in received.items() if name in known}
        return {**message, "headers": {**kept, **self.headers}}

    @cached_property
    def new_id(self) -> str:
        """A random id for a message without *delivery_id*; the same if the publish is retried."""
        return token_hex(16)


@dataclass
class Rescue:
    """The counts of one attempt to deliver parked (due, but so far undeliverable) messages."""

    delivered: int = 0
    waiting_again: int = 0
    expired: int = 0
    still_parked: int = 0

    @property
    def rescued(self) -> int:
        """The number of messages that are no longer parked: delivered, waiting again or expired."""
        return self.delivered + self.waiting_again + self.expired

    def __str__(self) -> str:
        return (
            f"{self.delivered} parked message(s) delivered, {self.waiting_again} waiting again, "
            f"{self.expired} expired, {self.still_parked} still parked"
        )


class WorkerPart(ABC):
    """The broker operations that a Celery worker needs for delayed messages."""

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        self.settings = settings
        self._channel = channel
        self._delays = channel.delays

    comes_back_late_seconds = 0.05
    """Messages that workers returned to the broker usually come at most this many seconds late."""

    def serve(self, queues: Sequence[str]) -> None:  # noqa: B027  most serve all queues alike
        """Store the names of the app's queues for later calls of other methods."""

    @abstractmethod
    def prepare(self, where: str) -> str:
        """Prepare the broker for delayed messages; return a sentence for the worker's log.

        *where* is the broker URL without the password. Raises NativeDelayError if the broker cannot
        store delayed messages.
        """

    @property
    def terms(self) -> str:
        """Return a text for the worker's log: the longest delay, or that the app drains."""
        if self.settings.drains:
            return "draining: new delayed tasks do not wait here"
        return f"longest delay {duration(self.settings.longest_delay_seconds)}"

    def dangers(self) -> Iterable[Finding]:
        """Report broker settings that can cause message loss or wrong delivery times."""
        return []

    def watch_queues(self) -> list[str]:
        """Keep full queues from delaying the messages of other queues.

        Returns a sentence for each queue whose due messages now take another way, and for each
        policy that changes how long messages wait. Raises ManagementUnavailable if RabbitMQ's
        management API does not answer.
        """
        return []

    def put_back(self, waits: Sequence[Wait]) -> list[Exception | None]:
        """Publish the messages *waits* again, because they arrived before the due time.

        Returns a list with one entry per message, in the order of *waits*: None if the message was
        published, or the error. A NativeDelayError repeats if the publish is tried again.
        """
        results: list[Exception | None] = []
        lost: Exception | None = None
        for wait in waits:
            try:
                if lost is None:
                    self.put_one_back(wait)
                results.append(lost)
            except NativeDelayError as exc:
                results.append(exc)
            except Exception as exc:  # the connection, so the messages after it fail, too
                lost = exc
                results.append(exc)
        return results

    def put_one_back(self, wait: Wait) -> None:
        """Publish again one message that arrived before the due time, for :meth:`put_back`.

        Raises NativeDelayError if the message cannot wait on the broker.
        """
        raise NotImplementedError

    def rescue(self) -> Rescue | None:
        """Publish parked (due, but so far undeliverable) messages again.

        Returns None if another process is publishing these messages now. Raises NotPermitted if the
        broker user lacks a permission.
        """
        return Rescue()

    def rescue_in_turn(self) -> Rescue | None:
        """Like :meth:`rescue`, but return None in a pause that all workers make together."""
        return self.rescue()

    def promoter(self, connect: Callable[..., Any]) -> Promoter | None:
        """Return a loop that moves due messages to queues; None if the broker itself moves them.

        The function *connect* takes ``transport_options`` and returns a kombu connection.
        """
        return None

    def sweep(self) -> int:
        """Delete expired state of keys, rates and schedules; return the number of rows."""
        return 0


class Promoter(Protocol):
    """A loop that moves due messages to their queues.

    *promoted* counts the moved messages; *parked* counts the undeliverable messages.
    """

    promoted: int
    parked: int

    def run(self) -> None: ...

    def stop(self) -> None:
        """Make :meth:`run` return soon. Any thread or signal handler may call this method."""


@dataclass(frozen=True)
class ParkedTask:
    """A task whose message is due, but undeliverable. Unknown attributes are None."""

    task: str | None
    id: str | None
    exchange: str | None
    routing_key: str | None
    due: str | None

    @classmethod
    def of(cls, headers: Mapping[str, Any], delayed: Delayed | None) -> ParkedTask:
        task, task_id = headers.get("task"), headers.get("id")
        if delayed is None:
            return cls(task, task_id, None, None, None)
        due = datetime.fromtimestamp(delayed.due_us / 1_000_000, UTC).isoformat(
            timespec="milliseconds"
        )
        return cls(task, task_id, delayed.exchange, delayed.routing_key, due)


@dataclass(frozen=True)
class Told:
    """The report of a command: *facts* for ``--json``, *sentences* for people, and problems."""

    facts: Mapping[str, Any]
    sentences: Sequence[str]
    found: Sequence[Finding] = ()


@dataclass(frozen=True)
class LevelQueue:
    """One delay queue of RabbitMQ (a queue with a TTL): name, TTL and number of messages."""

    name: str
    ttl_seconds: float
    waiting: int


@dataclass(frozen=True)
class Backlog:
    """The numbers of waiting and parked (due, but undeliverable) messages on a broker.

    - *levels*: the state of each delay queue of RabbitMQ; empty on other brokers
    - *store_answers*: False if the store is unreachable; None without a store
    - *until_first_us*: microseconds until the earliest due time, negative if overdue; None if
      unknown, or if no message waits
    - *in_store*: the number of tasks that wait in the store; None without a reachable store
    """

    waiting: int
    parked: int
    levels: tuple[LevelQueue, ...] = ()
    store_answers: bool | None = None
    until_first_us: int | None = None
    in_store: int | None = None


class AdminPart(ABC):
    """The broker operations that the ``celery delay`` commands need."""

    name: str
    """The name of the queues, keys or tables that hold the waiting messages."""
    parking: str
    """The name of the queue, key or table that holds due but undeliverable messages."""

    def serve(self, queues: Sequence[Any]) -> None:  # noqa: B027  most need no queues
        """Store the app's queues for later calls of other methods."""

    @abstractmethod
    def declare(self, queues: Sequence[Any]) -> Told:
        """Create the queues or tables for delayed messages; *queues* are the app's queues."""

    def examine(self) -> Iterable[Finding]:
        """Yield all problems: what the broker lacks, findings of :meth:`status`, wrong clocks."""
        return self.status().found

    @abstractmethod
    def status(self) -> Told:
        """Count the waiting and the parked (undeliverable) messages, and report problems."""

    @abstractmethod
    def backlog(self) -> Backlog:
        """Return the numbers of waiting and parked (undeliverable) messages, for monitoring."""

    @abstractmethod
    def purge(self) -> int:
        """Delete all waiting messages; return the number of deleted messages."""

    def uninstall(self) -> list[str]:
        """Delete this package's queues, exchanges, keys or rows; return texts that name them.

        Raises NativeDelayError, without deleting a queue, if messages still wait.
        """
        return []

    def parked(self, *, limit: int) -> tuple[int, list[ParkedTask]] | None:
        """Return the number of parked (undeliverable) messages, and up to *limit* of their tasks.

        Returns None if a worker is publishing the parked messages at this moment.
        """
        return 0, []

    def requeue(self) -> Rescue | None:
        """Publish parked (undeliverable) messages; return None if a worker is doing so already."""
        return Rescue()

    def purge_parked(self) -> int:
        """Delete all parked (undeliverable) messages; return the number of deleted messages."""
        return 0


def lines_of(channel: Any, settings: DelaySettings) -> RecordedLines:
    """Return the storage for rate-limited tasks; raise NoStore if there is no storage."""
    if not hasattr(channel, "lines"):
        raise without_store(channel)
    lines: RecordedLines = channel.lines(settings)
    return lines


def connect_once(connection: Any) -> None:
    """Connect, with one attempt for each URL: the caller makes the pauses between attempts."""
    tries = len(connection.alt) or 1
    connection.ensure_connection(max_retries=tries, interval_start=0, interval_step=0)


def without_store(channel: Any) -> NoStore:
    """Return the error for an app without a store, which needs one."""
    return NoStore(
        f"{channel.connection.client.as_uri()} keeps no keys, rates and schedules, and cannot list "
        f"or change waiting tasks: set native_delay_store in workers and producers to the URL of a "
        f'database or of a Redis, such as "postgresql+psycopg://host/shop"'
    )
