"""The interface of records: what this package knows about waiting tasks.

A Redis or a database keeps the records. A record is a text with a kind and a name. A pure function
decides the new text of a record, and whether a message is published with it. Both changes happen in
one step, and only if the record is still unchanged.

RabbitMQ, SQS and pgmq cannot list their waiting messages. There an index lists them, and a mark on
a delivery tells the worker that receives it not to run it.
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
#: that long before a worker receives it.
MARK_GRACE_MS = 30 * 86_400_000

#: An index entry that is overdue by a day, in microseconds, is removed: its message was lost, or
#: the worker that ran it could not reach the records.
STALE_AFTER_US = 86_400_000_000

#: The mark of a delivery that no worker may run: its task was cancelled or moved.
VOID = "void"

#: The mark of a new delivery until :meth:`Index.compare_and_set`. A worker that receives the
#: delivery earlier drops it, and makes the mark :data:`VOID`.
UNDECIDED = "undecided"


class RecordName(NamedTuple):
    """The name of a record: a *kind*, such as "key" or "rate", and a *name* within that kind."""

    kind: str
    name: str


@dataclass(frozen=True)
class Snapshot:
    """A record as it was read, and the waiting messages of its task.

    *now_us* is the time of reading in microseconds since the epoch, by the clock of the records.
    *text* is None if the record does not exist. If *text* is JSON with a field ``id``, that is the
    id of a task, and *messages* are its waiting messages: for each the broker's name of the
    message, and its due time in microseconds, 0 if the message is parked.
    """

    now_us: int
    text: str | None
    messages: tuple[tuple[Any, int], ...] = ()


@dataclass(frozen=True)
class Change(Generic[T]):
    """A decision about a record: its new *text*, and the *answer* for the caller.

    The record is kept until *kept_us*, in microseconds since the epoch. None as text removes it. An
    unchanged text is not written, so the record is kept as long as before. If *due_us* is set, the
    caller's message is published with that due time. If *replaces* is true as well, the waiting
    messages of the :class:`Snapshot` are cancelled.
    """

    text: str | None
    kept_us: int
    answer: T
    due_us: int | None = None
    replaces: bool = False


#: A pure function that decides the change of a record. It may be called several times.
Decide: TypeAlias = Callable[[Snapshot], Change[T]]

#: Makes or publishes the caller's message. Its arguments are the due time, the id of the new
#: delivery, and how far our clock is ahead of the clock of the records, in microseconds.
Publish: TypeAlias = Callable[[int, str, int], Any]


@dataclass(frozen=True)
class IndexEntry:
    """A waiting message in the index.

    *member* is its key, ``<task id>:<delivery id>``. *due_us* is its due time in microseconds. The
    text *entry* holds all that is needed to publish the message again; an entry of "" is not
    listed.
    """

    member: str
    due_us: int
    entry: str | bytes


@dataclass(frozen=True)
class CompareAndSet:
    """A change of a record and of waiting messages, made as a whole or not at all.

    It is made if the record *name* still has the text *before*, the messages *gone* are still in
    the index, and the message *new* still has the mark "undecided". Then the record gets the text
    *after* for *kept_ms*, the messages *gone* become void, and the message *new* is listed. If it
    is not made, the message *new* becomes void.
    """

    name: RecordName | None = None
    before: str | None = None
    after: str | None = None
    kept_ms: int = 0
    new: IndexEntry | None = None
    gone: Sequence[str] = ()


def delivery_of(member: str) -> str:
    """The delivery id in a key of the index, ``<task id>:<delivery id>``."""
    return member.rpartition(":")[2]


def tried_again(name: str, attempt: Callable[[], T | None]) -> T:
    """The first answer of *attempt* that is not None. Raises CannotDelay after 100 attempts.

    An *attempt* to change the record *name* answers None if another caller changed the record
    first.
    """
    for _ in range(TRIES):
        if (answer := attempt()) is not None:
            return answer
    raise CannotDelay(
        f"other callers changed the record of {name} {TRIES} times while this call tried to: try "
        f"again, or let fewer producers share a key"
    )


class MessageState(Enum):
    """The state of a waiting message in the records."""

    KNOWN = "known"
    """The index lists the message."""
    VOID = "void"
    """The task of the message was cancelled or moved: no worker may run it."""
    UNKNOWN = "unknown"
    """The records do not know the message."""


class Records(ABC):
    """Records by name. Any thread may use them.

    Methods raise RecordsUnavailable if the Redis or database cannot be reached.
    """

    where: str
    """The URL of the Redis or database, without its password."""

    needs_connection = False
    """True if the records use the broker connection of their channel, which must stay open."""

    @abstractmethod
    def read(self, name: RecordName) -> Snapshot:
        """Read a record, and the waiting messages of its task."""

    @abstractmethod
    def change(self, name: RecordName, decide: Decide[T], publish: Publish | None = None) -> T:
        """Change a record as *decide* says, and return the answer of *decide*.

        If *decide* sets a due time, *publish* makes or publishes the message in the same step.
        """

    @abstractmethod
    def load(self, names: Sequence[RecordName]) -> list[str | None]:
        """Read the texts of several records; None for each that does not exist."""

    @abstractmethod
    def latest(self, kind: str, limit: int) -> tuple[int, list[tuple[str, str]]]:
        """The *limit* records of a *kind* that are kept longest: their names and texts.

        The first value is the time in microseconds since the epoch, by the clock of the records.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connections. The next call opens new ones."""


class Index(ABC):
    """An index of waiting messages, for brokers that cannot list them: RabbitMQ, SQS and pgmq."""

    missed: int
    """Number of messages for which the index could not be written or read."""

    @abstractmethod
    def note(self, listed: IndexEntry) -> None:
        """Add a message that is about to be published. Never raises, and hardly ever blocks."""

    @abstractmethod
    def forget(self, member: str) -> None:
        """Remove a message that could not be published. Never raises, and hardly ever blocks."""

    @abstractmethod
    def received(self, member: str) -> bool | None:
        """Remove a message that a worker received. True if the worker may run it.

        None if the records did not answer in time.
        """

    @abstractmethod
    def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until all added messages are stored, for at most *timeout_seconds*."""

    @abstractmethod
    def look(self, name: RecordName | None, undecided: str | None, mark_ms: int) -> Snapshot:
        """Read a record, and mark the delivery with the id *undecided* for *mark_ms*.

        Without a *name* no record is read. Without *undecided* no delivery is marked.
        """

    @abstractmethod
    def unmark(self, delivery_id: str, left_ms: int = 0) -> None:
        """Remove the mark of a delivery, or keep the mark for *left_ms* more."""

    @abstractmethod
    def compare_and_set(self, step: CompareAndSet) -> bool:
        """Make the change *step*. False if a condition of *step* does not hold."""

    @abstractmethod
    def state_of(self, member: str) -> MessageState:
        """Look up the state of a message."""

    @abstractmethod
    def tasks(self, republishes: Any) -> WaitingTasks:
        """The waiting tasks in the index. *republishes* is the transport's part that reads them."""

    @abstractmethod
    def sweep(self) -> int:
        """Remove index entries that are overdue by a day, and return their number."""

    @abstractmethod
    def purge(self) -> None:
        """Remove all index entries that are not due yet."""
