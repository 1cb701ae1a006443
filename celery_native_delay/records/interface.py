"""The interface to the stored state about waiting tasks, in a Redis or a database.

For example, the stored state of a debounce key has the id of the task that will run. A pure
function computes the new state, and decides if a message is published. The new state is stored only
if no other process has changed the state meanwhile.

RabbitMQ, SQS and pgmq cannot list their waiting messages, so this package stores a list of the
waiting messages. A worker reads this list before a waiting task runs, and drops cancelled tasks.
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
    """A stored state at the time *now_us*, and waiting messages of the task that the state names.

    - *now_us*: microseconds since the epoch, by the clock of the Redis or database.
    - *text*: the stored state, or None. The field ``id`` of a JSON state is the id of a task.
    - *messages*: name and due time (in microseconds) of each waiting message of this task. The due
      time 0 means that the task is due, but the task's queue does not exist.
    """

    now_us: int
    text: str | None
    messages: tuple[tuple[Any, int], ...] = ()


@dataclass(frozen=True)
class Change(Generic[T]):
    """A change of a stored state, and *answer*, a value for the caller of :meth:`Records.change`.

    - *text*: the new state, or None to remove the state.
    - *kept_us*: the expiry of the new state, in microseconds since the epoch.
    - *due_us*: the due time of a message to publish, or None to publish no message.
    - *replaces*: True to cancel the waiting messages of the :class:`Snapshot`.
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
    """A message in the list of waiting messages.

    - *member*: the message's name in the list, ``<task id>:<delivery id>``.
    - *due_us*: the due time in microseconds since the epoch.
    - *entry*: a text from which the message can be published again, or "" for a cancelled message.
    """

    member: str
    due_us: int
    entry: str | bytes


@dataclass(frozen=True)
class CompareAndSet:
    """A compare-and-set of a stored state and of waiting messages.

    If the state *name* equals *before*, all these changes are made in one step:

    - The state becomes *after*, for *kept_ms* milliseconds.
    - The waiting messages *gone* are cancelled.
    - The message *new* is added to the list of waiting messages.

    If the state differs, or a message in *gone* was delivered, the message *new* is cancelled.
    """

    name: RecordName | None = None
    before: str | None = None
    after: str | None = None
    kept_ms: int = 0
    new: IndexEntry | None = None
    gone: Sequence[str] = ()


def delivery_of(member: str) -> str:
    """Return the delivery id (second part) of a message's name ``<task id>:<delivery id>``."""
    return member.rpartition(":")[2]


def tried_again(name: str, attempt: Callable[[], T | None]) -> T:
    """Repeat the call of *attempt* while the result is None; raise CannotDelay after 100 calls."""
    for _ in range(TRIES):
        if (answer := attempt()) is not None:
            return answer
    raise CannotDelay(
        f"other callers changed the record of {name} {TRIES} times while this call tried to: try "
        f"again, or let fewer producers share a key"
    )


class MessageState(Enum):
    """The state of a message in the list of waiting messages."""

    KNOWN = "known"
    """The message is in the list of waiting messages."""
    VOID = "void"
    """The task of the message was cancelled or rescheduled: no worker may run the message."""
    UNKNOWN = "unknown"
    """The message is not in the list of waiting messages."""


class Records(ABC):
    """Reads and changes the stored state about waiting tasks. Thread-safe.

    Methods raise RecordsUnavailable if the Redis or database cannot be reached.
    """

    where: str
    """The URL of the Redis or database, without its password."""

    needs_connection = False
    """True if the broker itself stores the state, so that the connection must stay open."""

    @abstractmethod
    def read(self, name: RecordName) -> Snapshot:
        """Read a stored state, and the waiting messages of the task that the state names."""

    @abstractmethod
    def change(self, name: RecordName, decide: Decide[T], publish: Publish | None = None) -> T:
        """Change a stored state, and publish a message in the same step.

        Args:
            name: the name of the stored state.
            decide: a function that computes the change, and may be called several times.
            publish: a function that publishes a message, called if the change has a due time.

        Returns:
            the field *answer* of the change.
        """

    @abstractmethod
    def load(self, names: Sequence[RecordName]) -> list[str | None]:
        """Read stored states by their names. A missing state gives None."""

    @abstractmethod
    def latest(self, kind: str, limit: int) -> tuple[int, list[tuple[str, str]]]:
        """Read up to *limit* stored states of one *kind*, latest expiry first.

        Returns:
            the server's time in microseconds since the epoch, and pairs of a state's name and text.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connections to the Redis or database. The next call opens new connections."""


class Index(ABC):
    """A list of waiting messages, for brokers without such a list: RabbitMQ, SQS and pgmq."""

    missed: int
    """The number of messages that could not be written to or read from the list."""

    @abstractmethod
    def note(self, listed: IndexEntry) -> None:
        """Add a message to the list of waiting messages before the publish. Never raises."""

    @abstractmethod
    def forget(self, member: str) -> None:
        """Remove an unpublished message from the list of waiting messages. Never raises."""

    @abstractmethod
    def received(self, member: str) -> bool | None:
        """Remove a received message from the list. Returns False if no worker may run the message.

        Returns None if the Redis or database did not answer in time.
        """

    @abstractmethod
    def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until all added messages are stored, for at most *timeout_seconds*."""

    @abstractmethod
    def look(self, name: RecordName | None, undecided: str | None, mark_ms: int) -> Snapshot:
        """Read a stored state, and let workers drop a message that the broker will confirm later.

        Args:
            name: the name of the stored state, or None to read no state.
            undecided: the delivery id (the message's own id), or None if there is no message.
            mark_ms: the milliseconds for which workers drop the message.
        """

    @abstractmethod
    def unmark(self, delivery_id: str, left_ms: int = 0) -> None:
        """Undo :meth:`look`, now or in *left_ms* milliseconds: workers may then run the message."""

    @abstractmethod
    def compare_and_set(self, step: CompareAndSet) -> bool:
        """Make the changes in *step*. Returns False if another process made a change first."""

    @abstractmethod
    def state_of(self, member: str) -> MessageState:
        """Return the state of a waiting message: listed, cancelled or unknown."""

    @abstractmethod
    def tasks(self, republishes: Any) -> WaitingTasks:
        """Return an object that lists, cancels and moves the waiting tasks.

        *republishes* is the broker's object that publishes waiting messages again.
        """

    @abstractmethod
    def sweep(self) -> int:
        """Remove messages that are overdue by a day; return the number of removed messages."""

    @abstractmethod
    def purge(self) -> None:
        """Remove all messages with a future due time from the list of waiting messages."""
