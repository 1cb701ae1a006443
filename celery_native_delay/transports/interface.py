"""The interface of any transport to workers, the command line and batches.

A channel that can delay has ``worker_part(settings)`` and ``admin_part(settings)``, its transport
``bulk_publisher(window=…)``; their own class decides what lies behind, so that no caller has to
know which broker it is.
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
    """A *message*, as kombu received it, that is to wait in the broker and come back.

    It comes back to *queue* alone, which it was consumed from; *due_us* counts from the epoch.
    *delivery_id* is the one that it keeps, None for a new one; *headers* are put upon its own.
    """

    message: Any
    queue: str
    due_us: int
    delivery_id: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)

    def on(self, message: dict[str, Any]) -> dict[str, Any]:
        """A *message* of kombu's virtual transports, with these headers."""
        if not self.headers:
            return message
        return {**message, "headers": {**(message.get("headers") or {}), **self.headers}}

    @cached_property
    def new_id(self) -> str:
        """A delivery id for a message without one, for every attempt to put it back."""
        return token_hex(16)


@dataclass
class Rescue:
    """Numbers of messages, as one round over the parked ones left them."""

    delivered: int = 0
    waiting_again: int = 0
    expired: int = 0
    still_parked: int = 0

    @property
    def rescued(self) -> int:
        """Messages that are no longer parked."""
        return self.delivered + self.waiting_again + self.expired

    def __str__(self) -> str:
        return (
            f"{self.delivered} parked message(s) delivered, {self.waiting_again} waiting again, "
            f"{self.expired} expired, {self.still_parked} still parked"
        )


class WorkerPart(ABC):
    """A worker's work for its broker besides consuming, on one channel of its own."""

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        self.settings = settings
        self._channel = channel
        self._delays = channel.delays

    comes_back_late_seconds = 0.05
    """Lateness of a message that comes back, at most, where nothing is the matter."""

    @abstractmethod
    def prepare(self, where: str) -> str:
        """Make the broker ready for consuming; the sentence that the worker logs about it.

        *where* is the broker's URL without its password. NativeDelayError: delayed messages cannot
        wait there; saying the way out.
        """

    @property
    def terms(self) -> str:
        """The end of the sentence that the worker logs, for every broker."""
        longest = duration(self.settings.longest_delay_seconds)
        return f"longest delay {longest}; adopting {'on' if self.settings.adopt else 'off'}"

    def dangers(self) -> list[Finding]:
        """Settings on the broker that may lose or bend delays; or ManagementUnavailable."""
        return []

    def put_back(self, waits: Sequence[Wait]) -> list[NativeDelayError | None]:
        """Let messages wait in the broker; for each of *waits* why it cannot, None once it does."""
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
        """Let a message wait in the broker, for the queue it came from; or raise why it cannot."""

    def rescue(self) -> Rescue | None:
        """Try every parked message once; None if another process does, or NotPermitted."""
        return Rescue()

    def promoter(self, connect: Callable[..., Any]) -> Promoter | None:
        """A loop that hands over what is due; None on a broker that does it by itself.

        *connect* makes kombu connections, given their ``transport_options``.
        """
        return None

    def receipts(self) -> Receipts | None:
        """The receipts to ask about every message that waited; None if no records are kept."""
        return None

    def sweep(self) -> int:
        """Remove what the records hold of messages that were lost long ago; their number."""
        return 0


class Promoter(Protocol):
    """A loop that hands over what is due; *promoted* and *parked* count messages."""

    promoted: int
    parked: int

    def run(self) -> None: ...

    def stop(self) -> None:
        """End :meth:`run` soon; from any thread or signal handler."""


@runtime_checkable
class ServesQueues(Protocol):
    """A part on a broker where every queue needs something of its own."""

    def serve(self, queues: Sequence[str]) -> None:
        """Take care of these, by name: those a worker consumes from, or all of the app's."""


class Answer(Enum):
    """The records' word on a message that waited."""

    RUN = "run"
    DROP = "drop"
    """Its task was cancelled or moved; another message has taken its place."""
    AWAY = "away"
    """The records cannot be asked right now."""


class Receipts(Protocol):
    """The records, which a worker asks about every message that waited, before anything else."""

    def may_run(self, headers: Mapping[str, Any], delayed: Delayed) -> Answer:
        """The answer for a message, by its *headers* and its wait."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class ParkedTask:
    """A parked message, as far as it can tell who it is; *due* is ISO 8601."""

    task: str | None
    id: str | None
    exchange: str | None
    routing_key: str | None
    due: str | None

    @classmethod
    def of(cls, headers: Mapping[str, Any], delayed: Delayed | None) -> ParkedTask:
        """A parked task by its *headers* and its wait, None for one that lost it."""
        task, task_id = headers.get("task"), headers.get("id")
        if delayed is None:
            return cls(task, task_id, None, None, None)
        due = datetime.fromtimestamp(delayed.due_us / 1_000_000, UTC).isoformat(
            timespec="milliseconds"
        )
        return cls(task, task_id, delayed.exchange, delayed.routing_key, due)


class Report(Protocol):
    """A report that the command line shows."""

    def as_json(self) -> dict[str, Any]:
        """The report for ``--json``."""

    def lines(self, table: Callable[[tuple[str, ...], list[tuple[Any, ...]]], str]) -> list[str]:
        """The report for people; *table* aligns columns under headings."""


@dataclass(frozen=True)
class Told:
    """A report in *facts* for scripts, and in *sentences* for people."""

    facts: Mapping[str, Any]
    sentences: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        return dict(self.facts)

    def lines(self, table: Callable[..., str]) -> list[str]:
        return list(self.sentences)


@dataclass(frozen=True)
class Level:
    """A queue in which messages wait, and how many are in it."""

    name: str
    ttl_seconds: float
    waiting: int


@dataclass(frozen=True)
class Backlog:
    """Numbers of messages that wait on a broker.

    *records_answer* says whether the records do, None where none are kept. Only if so, it is
    known when the first message is due: *until_first_us* in microseconds, below 0 since it was;
    None if nothing waits. *in_records* is how many it says wait, None where it does not.
    """

    waiting: int
    parked: int
    levels: tuple[Level, ...] = ()
    records_answer: bool | None = None
    until_first_us: int | None = None
    in_records: int | None = None


class AdminPart(Protocol):
    """The command line's work on a broker."""

    name: str
    """The name that all of it goes by, such as ``celery_delay.v1.31x125ms.quorum``."""
    parking: str
    """The place where parked messages lie."""

    def declare(self, queues: Sequence[Any]) -> Report:
        """Set up whatever delayed messages need; *queues* are the app's."""

    def verify(self) -> list[Finding]:
        """Compare the broker with the plan: what is there, how it is set up, what overrides it.

        Nothing is declared, and no worker need run.
        """

    def examine(self) -> list[Finding]:
        """Look at what moves: what is overdue, parked, held up; who hands over; records, clocks."""

    def status(self) -> Report:
        """Count what waits and what is parked, by the broker alone."""

    def backlog(self) -> Backlog:
        """Count what waits as :class:`Backlog`, quick enough to be asked every few seconds."""

    def purge(self) -> int:
        """Throw away all that waits; how many."""

    def parked(self, *, limit: int) -> tuple[int, list[ParkedTask]] | None:
        """Number of parked messages, and the first *limit*; None while a worker rescues."""

    def requeue(self) -> Rescue | None:
        """:meth:`WorkerPart.rescue`, here and now; None while a worker rescues."""

    def purge_parked(self) -> int:
        """Throw away all that is parked; how many."""


@runtime_checkable
class ExpectsQueues(Protocol):
    """An admin part that compares the broker with what an app's queues need, too."""

    def expect(self, queues: Sequence[Any]) -> None:
        """*queues* are the app's."""


@runtime_checkable
class CountsByRecords(Protocol):
    """An admin part on a broker that cannot be looked into, whose records know what waits in it."""

    def status_with_records(self) -> Report:
        """:meth:`AdminPart.status` and what the records say, or why they are away.

        May take as long as records have to answer.
        """


@dataclass(frozen=True)
class Exported:
    """All that a broker needs before the first message waits, as *text* for other tools to declare.

    *counts* are the declarations of each kind. *left_out* are queues and exchanges that come and go
    with a process, which declares them itself.
    """

    text: str
    counts: Mapping[str, int]
    left_out: tuple[str, ...]


@runtime_checkable
class Exports(Protocol):
    """A transport to a broker that has to have queues and bindings before a message can wait."""

    def export(
        self,
        settings: DelaySettings,
        queues: Sequence[Any],
        *,
        vhost: str | None = None,
        own_queues: bool = True,
    ) -> Exported:
        """All that *settings* and the app's *queues* need there; not connected.

        *vhost* None is that of the connection. Without *own_queues* the app's own are left out.
        """


def lines_of(channel: Any, settings: DelaySettings) -> Lines:
    """The lines of rated tasks beside the broker of *channel*; or NoRecords."""
    if not hasattr(channel, "lines"):
        raise NoRecords(
            "nothing beside this broker can count the tasks of native_delay_rates: use Redis or a "
            "database as the broker, or RabbitMQ, SQS or pgmq with native_delay_records"
        )
    lines: Lines = channel.lines(settings)
    return lines


#: The way out where no records of keys can be kept.
WHERE_KEYS_ARE_KEPT = (
    "debounce, throttle and unique need the records of their keys in one place with what waits: "
    "use a Redis broker, RabbitMQ, SQS or pgmq with native_delay_records set, a sqla+… broker, or "
    "one whose messages wait in native_delay_store"
)


def without_records(channel: Any) -> UnsupportedBroker:
    """The refusal of a broker beside whose messages no records of keys can be kept."""
    where = channel.connection.client.as_uri()
    return UnsupportedBroker(
        f"{where}, as it is set up, has no place for keys: {WHERE_KEYS_ARE_KEPT}"
    )
