"""The interface of the records: the state about waiting tasks, in a Redis or a database.

A record is a text with a kind and a name. A pure function decides the new text of a record, and
whether a message is published at the same time. Record and message change in one step, and only if
no other caller has changed the record.

RabbitMQ, SQS and pgmq cannot list their waiting messages. For these brokers an index lists the
messages. A mark in the index tells a worker not to run a message that it receives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from ..errors import CannotDelay
from .waiting import WaitingTasks

T = TypeVar("T")

#: Attempts to change one record while other callers change it. In each round one caller succeeds.
TRIES = 100

#: Seconds that a publish or a worker waits for the records: to connect, and for an answer.
PATIENCE_SECONDS = 0.3

#: Seconds that a person, or a call with a key, waits for the records.
ANSWER_SECONDS = 5.0

#: Seconds without a new attempt after the records failed: the first time, and at most.
LEFT_ALONE_SECONDS = (1.0, 30.0)

#: A mark is kept for 30 days, in ms, after its message is due: the message may lie in its queue for
#: 30 days before a worker receives the message.
MARK_GRACE_MS = 30 * 86_400_000

#: An index entry that is overdue by a day, in microseconds, is removed: its message was lost, or
#: the worker that ran the message could not reach the records.
STALE_AFTER_US = 86_400_000_000

#: The mark of a delivery that no worker may run, because its task was cancelled or moved.
VOID = "void"

#: The mark of a new delivery until :meth:`Index.compare_and_set`. A worker that receives the
#: delivery earlier drops the delivery, and sets the mark :data:`VOID`.
UNDECIDED = "undecided"


class RecordName(NamedTuple):
    """The name of a record (a stored text): a *kind*, such as "key" or "rate", and a *name*."""

    kind: str
    name: str


@dataclass(frozen=True)
class Snapshot:
    """A record (a stored text) as it was read at *now_us*, with the waiting messages of its task.

    *now_us* is in microseconds since the epoch, by the clock of the Redis or database. *text* is
    None if the record does not exist. The field ``id`` of a JSON *text* is a task's id. *messages*
    then are the task's waiting messages: for each the broker's name of the message, and its due
    time in microseconds, or 0 if the message is parked (due, but its queue does not exist).
    """

    now_us: int
    text: str | None
    messages: tuple[tuple[Any, int], ...] = ()


@dataclass(frozen=True)
class Change(Generic[T]):
    """A decision to change a record (a stored text), and the *answer* for the caller.

    The record gets the new *text* and is kept until *kept_us*, in microseconds since the epoch.
    None as *text* removes the record. An unchanged text is not written, and keeps its expiry. If
    *due_us* is set, the caller's message is published. If *replaces* is true as well, the waiting
    messages of the :class:`Snapshot` are cancelled.
    """

    text: str | None
    kept_us: int
    answer: T
    due_us: int | None = None
    replaces: bool = False


#: A pure function that decides the change of a record. The function may be called several times.
Decide: TypeAlias = Callable[[Snapshot], Change[T]]

#: Makes or publishes the caller's message. Its arguments are the due time, the id of the new
#: delivery, and how far our clock is ahead of the clock of the records, in microseconds.
Publish: TypeAlias = Callable[[int, str, int], Any]


@dataclass(frozen=True)
class IndexEntry:
    """A waiting message in the index, which lists messages for brokers without such a list.

    *member* is the entry's key, ``<task id>:<delivery id>``. *due_us* is the due time in
    microseconds since the epoch. *entry* is a text with all fields that are needed to publish the
    message again. A message with the *entry* "" is not listed.
    """

    member: str
    due_us: int
    entry: str | bytes


@dataclass(frozen=True)
class CompareAndSet:
    """A change of a record (a stored text) and of waiting messages, made as a whole or not at all.

    The change is made if the record *name* still has the text *before*, the messages *gone* are
    still in the index, and the message *new* still has the mark "undecided". Then the record gets
    the text *after* for *kept_ms*, workers drop the messages *gone*, and *new* is added to the
    index. If a condition does not hold, workers drop the message *new*.
    """

    name: RecordName | None = None
    before: str | None = None
    after: str | None = None
    kept_ms: int = 0
    new: IndexEntry | None = None
    gone: Sequence[str] = ()


def delivery_of(member: str) -> str:
    """Return the delivery id in an index key of the form ``<task id>:<delivery id>``."""
    return member.rpartition(":")[2]


def tried_again(name: str, attempt: Callable[[], T | None]) -> T:
    """Call *attempt* until its answer is not None, and return the answer.

    *attempt* tries to change the record *name*, and answers None if another caller changed the
    record first. Raises CannotDelay after 100 attempts.
    """
    for _ in range(TRIES):
        if (answer := attempt()) is not None:
            return answer
    raise CannotDelay(
        f"other callers changed the record of {name} {TRIES} times while this call tried to: try "
        f"again, or let fewer producers share a key"
    )


class MessageState(Enum):
    """The state of a waiting message in the index of waiting messages."""

    KNOWN = "known"
    """The index lists the message."""
    VOID = "void"
    """The task of the message was cancelled or moved: no worker may run the message."""
    UNKNOWN = "unknown"
    """The index does not know the message."""


class Records(ABC):
    """Reads and changes records (state about waiting tasks), from any thread.

    Methods raise RecordsUnavailable if the Redis or database cannot be reached.
    """

    where: str
    """The URL of the Redis or database, without its password."""

    needs_connection = False
    """True if the records are in the broker, so that the broker connection must stay open."""

    @abstractmethod
    def read(self, name: RecordName) -> Snapshot:
        """Read the record (a stored text) *name*, and the waiting messages of the record's task."""

    @abstractmethod
    def change(self, name: RecordName, decide: Decide[T], publish: Publish | None = None) -> T:
        """Change the record (a stored text) *name* as *decide* says, and return its answer.

        If *decide* sets a due time, *publish* makes or publishes a message in the same step.
        """

    @abstractmethod
    def load(self, names: Sequence[RecordName]) -> list[str | None]:
        """Read several records (stored texts). The text is None if the record does not exist."""

    @abstractmethod
    def latest(self, kind: str, limit: int) -> tuple[int, list[tuple[str, str]]]:
        """Return names and texts of the *limit* records of a *kind* that expire last.

        The first value is the server's time in microseconds since the epoch.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connections to the Redis or database. The next call opens new connections."""


class Index(ABC):
    """An index of waiting messages, for brokers that cannot list them: RabbitMQ, SQS and pgmq."""

    missed: int
    """Number of messages for which the index could not be written or read."""

    @abstractmethod
    def note(self, listed: IndexEntry) -> None:
        """Add a message that is about to be published. Never raises, and hardly ever blocks."""

    @abstractmethod
    def forget(self, member: str) -> None:
        """Remove a message that was not published. Never raises, and hardly ever blocks."""

    @abstractmethod
    def received(self, member: str) -> bool | None:
        """Remove a message that a worker received. Return True if the worker may run it.

        None is returned if the index did not answer in time.
        """

    @abstractmethod
    def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until all added messages are stored in the index, for at most *timeout_seconds*."""

    @abstractmethod
    def look(self, name: RecordName | None, undecided: str | None, mark_ms: int) -> Snapshot:
        """Read the record *name*, and mark the delivery *undecided*: workers drop the delivery.

        If *name* is None, no record is read. If *undecided* is None, no delivery is marked. The
        mark is kept for *mark_ms* milliseconds.
        """

    @abstractmethod
    def unmark(self, delivery_id: str, left_ms: int = 0) -> None:
        """Remove a delivery's mark "undecided", or keep the mark for *left_ms* more."""

    @abstractmethod
    def compare_and_set(self, step: CompareAndSet) -> bool:
        """Make the change *step*. Returns False if a condition of *step* does not hold."""

    @abstractmethod
    def state_of(self, member: str) -> MessageState:
        """Look up the state of a waiting message: listed, cancelled or unknown."""

    @abstractmethod
    def tasks(self, republishes: Any) -> WaitingTasks:
        """Return the waiting tasks in the index. *republishes* publishes a message again."""

    @abstractmethod
    def sweep(self) -> int:
        """Remove index entries that are overdue by a day, and return their number."""

    @abstractmethod
    def purge(self) -> None:
        """Remove all index entries whose messages are not due yet."""
