"""The interface to the stored state about waiting tasks, in a Redis or a database.

A *record* is a stored text, such as the state of a debounce key. A pure function computes the new
state, and decides if a message is published. State and message change in one step, and only if no
other process has changed the state.

RabbitMQ, SQS and pgmq cannot list their waiting messages. For these brokers the package keeps an
index of the waiting messages. A worker reads the index before it runs a waiting task, and does not
run cancelled tasks.
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
    """The name of a stored state: its *kind*, such as "key" or "rate", and its *name*."""

    kind: str
    name: str


@dataclass(frozen=True)
class Snapshot:
    """A stored state as it was read at the time *now_us*, with the waiting messages of its task.

    *now_us* is in microseconds since the epoch, by the clock of the Redis or database. *text* is
    the state, or None if no state is stored. If *text* is JSON, its field ``id`` is the id of a
    task. *messages* are the waiting messages of this task: for each message the broker's name and
    the due time in microseconds, or 0 if the message is due but its queue does not exist.
    """

    now_us: int
    text: str | None
    messages: tuple[tuple[Any, int], ...] = ()


@dataclass(frozen=True)
class Change(Generic[T]):
    """A decision to change a stored state, and the *answer* for the caller.

    *text* is the new state, and is kept until *kept_us*, in microseconds since the epoch. If *text*
    is None, the stored state is removed. If *due_us* is set, the caller's message is published. If
    *replaces* is true, the waiting messages of the :class:`Snapshot` are cancelled.
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
    """A waiting message in the index, which lists messages for brokers that cannot list messages.

    *member* is the key in the index, ``<task id>:<delivery id>``. *due_us* is the due time in
    microseconds since the epoch. *entry* is a text with all fields that are needed to publish the
    message again; if *entry* is "", the message is not listed.
    """

    member: str
    due_us: int
    entry: str | bytes


@dataclass(frozen=True)
class CompareAndSet:
    """Changes of a stored state and of waiting messages: all changes are made, or none.

    The stored state *name* changes from *before* to *after*, and is kept for *kept_ms*. Workers
    drop the messages *gone*, and the message *new* is added to the index. If the stored state is
    not *before*, or a message in *gone* has been delivered, nothing changes and workers drop the
    message *new*.
    """

    name: RecordName | None = None
    before: str | None = None
    after: str | None = None
    kept_ms: int = 0
    new: IndexEntry | None = None
    gone: Sequence[str] = ()


def delivery_of(member: str) -> str:
    """Return the delivery id in an index key ``<task id>:<delivery id>``."""
    return member.rpartition(":")[2]


def tried_again(name: str, attempt: Callable[[], T | None]) -> T:
    """Call the function *attempt* until its result is not None, and return the result.

    Raises CannotDelay after 100 calls. *name* is the name of a stored state, for the error's text.
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
    """Reads and changes the stored state about waiting tasks, from any thread.

    Methods raise RecordsUnavailable if the Redis or database cannot be reached.
    """

    where: str
    """The URL of the Redis or database, without its password."""

    needs_connection = False
    """True if the records are in the broker, so that the broker connection must stay open."""

    @abstractmethod
    def read(self, name: RecordName) -> Snapshot:
        """Read the stored state *name*, and the waiting messages of the state's task."""

    @abstractmethod
    def change(self, name: RecordName, decide: Decide[T], publish: Publish | None = None) -> T:
        """Change the stored state *name*. The function *decide* computes the change.

        If the change has a due time, the function *publish* publishes a message in the same step.
        Returns the answer of the change.
        """

    @abstractmethod
    def load(self, names: Sequence[RecordName]) -> list[str | None]:
        """Read the stored states with these *names*. A missing state gives None."""

    @abstractmethod
    def latest(self, kind: str, limit: int) -> tuple[int, list[tuple[str, str]]]:
        """Return the server's time, and the *limit* stored states of a *kind* that expire last.

        The time is in microseconds since the epoch. Each state comes with its name.
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
        """Add a message to the index before the message is published. Never raises."""

    @abstractmethod
    def forget(self, member: str) -> None:
        """Remove a message from the index if the message was not published. Never raises."""

    @abstractmethod
    def received(self, member: str) -> bool | None:
        """Remove a received message from the index. Returns True if a worker may run the message.

        Returns None if the index did not answer in time.
        """

    @abstractmethod
    def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until all added messages are stored in the index, for at most *timeout_seconds*."""

    @abstractmethod
    def look(self, name: RecordName | None, undecided: str | None, mark_ms: int) -> Snapshot:
        """Read the stored state *name*, and mark a message, so that workers drop the message.

        *undecided* is the message's delivery id. The mark expires after *mark_ms* milliseconds. If
        *name* is None, no state is read. If *undecided* is None, no message is marked.
        """

    @abstractmethod
    def unmark(self, delivery_id: str, left_ms: int = 0) -> None:
        """Remove the mark that makes workers drop a message, now or in *left_ms* milliseconds."""

    @abstractmethod
    def compare_and_set(self, step: CompareAndSet) -> bool:
        """Make the changes in *step*. Returns False if another process made a change first."""

    @abstractmethod
    def state_of(self, member: str) -> MessageState:
        """Look up the state of a waiting message: listed, cancelled or unknown."""

    @abstractmethod
    def tasks(self, republishes: Any) -> WaitingTasks:
        """Return the waiting tasks in the index. *republishes* can publish messages again."""

    @abstractmethod
    def sweep(self) -> int:
        """Remove messages that are overdue by a day from the index, and return their number."""

    @abstractmethod
    def purge(self) -> None:
        """Remove all messages that are not due yet from the index."""
