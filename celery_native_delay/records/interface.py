"""The interface to the stored state about waiting tasks, in Redis or a database.

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

#: Attempts to change one stored state while other callers change it. Of several callers that try at
#: the same time, one succeeds.
TRIES = 100

#: Seconds that a publish or a worker waits for the records: to connect, and for an answer.
PATIENCE_SECONDS = 0.3

#: Seconds that a person, or a call with a key, waits for the records.
ANSWER_SECONDS = 5.0

#: Seconds between attempts to reach unreachable records: the first pause, and the longest pause.
LEFT_ALONE_SECONDS = (1.0, 30.0)

#: A mark (:data:`VOID` or :data:`UNDECIDED`) is kept for 30 days, in ms, after its message is due:
#: the message may lie in its queue for 30 days before a worker receives the message.
MARK_GRACE_MS = 30 * 86_400_000

#: A message that is overdue by a day, in microseconds, is removed from the list: the message was
#: lost, or the worker that ran the message could not reach the records.
STALE_AFTER_US = 86_400_000_000

#: The mark of a message that no worker may run, because its task was cancelled or rescheduled.
VOID = "void"

#: The mark of a new message until :meth:`Index.compare_and_set`. A worker that receives the message
#: earlier drops the message, and sets the mark :data:`VOID`.
UNDECIDED = "undecided"


class RecordName(NamedTuple):
    """Identifies a stored state, for example by *kind* "key" and *name* "unique:shop.pay:7"."""

    kind: str
    name: str


@dataclass(frozen=True)
class Snapshot:
    """A stored state (for example of a debounce key), and the waiting messages of its task.

    - *now_us*: the time of the read in microseconds since the epoch, by the clock of the Redis or
      database.
    - *text*: the stored state, or None if no state is stored. In a JSON state, the field ``id``
      is the task's id.
    - *messages*: name and due time (in microseconds) of each waiting message of this task. A
      message has the due time 0 if it is overdue and its queue does not exist.
    """

    now_us: int
    text: str | None
    messages: tuple[tuple[Any, int], ...] = ()


@dataclass(frozen=True)
class Change(Generic[T]):
    """A new stored state, and the due time of a message to publish.

    - *text*: the new state, or None to remove the state.
    - *kept_us*: the time when the new state expires, in microseconds since the epoch.
    - *answer*: the value that :meth:`Records.change` returns.
    - *due_us*: the due time of a message to publish, or None to publish no message.
    - *replaces*: True to cancel the waiting messages that were read with the old state.
    """

    text: str | None
    kept_us: int
    answer: T
    due_us: int | None = None
    replaces: bool = False


#: A pure function that computes the change of a stored state, and may be called several times.
Decide: TypeAlias = Callable[[Snapshot], Change[T]]

#: A function that makes or publishes the caller's message. The arguments are the due time, the
#: message's delivery id, and the microseconds by which this machine's clock is ahead of the clock
#: of the Redis or database.
Publish: TypeAlias = Callable[[int, str, int], Any]


class IndexEntry(NamedTuple):
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

    The condition: the stored state called *name* has the text *before*, and none of the messages
    in *gone* was delivered. If the condition holds, one step makes all these changes:

    - The state becomes *after*, and expires *kept_ms* milliseconds later.
    - Workers drop the messages *gone*.
    - The list of waiting messages gets the message *new*, and workers may run this message.

    If the condition does not hold, nothing changes. If the message *new* was already published
    then, workers drop this message.
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
    """Call *attempt* until the result is not None, and return the result.

    Raises CannotDelay after 100 calls. *name* names the stored state in the error's text.
    """
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
        """Read a stored state, such as a unique key's task id, and the task's waiting messages."""

    @abstractmethod
    def change(self, name: RecordName, decide: Decide[T], publish: Publish | None = None) -> T:
        """Change a stored state, and publish a message in the same step.

        Args:
            name: the name of the stored state.
            decide: a function that returns a :class:`Change`, and may be called several times.
            publish: a function that publishes a message, called if ``Change.due_us`` is set.

        Returns:
            the value ``Change.answer``.
        """

    @abstractmethod
    def load(self, names: Sequence[RecordName]) -> list[str | None]:
        """Read stored states by their names. A missing state gives None."""

    @abstractmethod
    def latest(self, kind: str, limit: int) -> tuple[int, list[tuple[str, str]]]:
        """Read up to *limit* stored states of one *kind*; the states that expire last come first.

        Returns:
            the server's time in microseconds since the epoch, and pairs of a state's name and text.
        """

    @abstractmethod
    def clear(self) -> int:
        """Delete everything that is stored for this app's namespace; return the number of items."""

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
        """Remove a message from the list of waiting messages: its publish failed. Never raises."""

    @abstractmethod
    def received(self, member: str) -> bool | None:
        """Remove a received message from the list of waiting messages.

        Returns True if a worker may run the message, and False if the message was cancelled or
        replaced. Returns None if the Redis or database did not answer.
        """

    @abstractmethod
    def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until all added messages are stored, for at most *timeout_seconds*."""

    @abstractmethod
    def look(self, name: RecordName | None, undecided: str | None, mark_ms: int) -> Snapshot:
        """Read a stored state, such as a debounce key's, and mark a new message as "undecided".

        The caller then publishes the message. Workers drop an undecided message.
        :meth:`compare_and_set` removes the mark.

        Args:
            name: the name of the stored state, or None to read no state.
            undecided: the new message's delivery id, or None to mark no message.
            mark_ms: the milliseconds until the mark expires.
        """

    @abstractmethod
    def unmark(self, delivery_id: str, left_ms: int = 0) -> None:
        """Remove a message's mark, after which workers no longer drop the message.

        If *left_ms* is above 0, the mark stays for this many milliseconds.
        """

    @abstractmethod
    def compare_and_set(self, step: CompareAndSet) -> bool:
        """Make the changes in *step*. Returns False if the conditions of *step* do not hold."""

    @abstractmethod
    def state_of(self, member: str) -> MessageState:
        """Return the state of a waiting message: listed, cancelled or unknown."""

    @abstractmethod
    def tasks(self, republishes: Any) -> WaitingTasks:
        """Return an object that lists, cancels and reschedules the waiting tasks.

        To cancel or reschedule a task, this object publishes a changed copy of the task's message
        by the methods of *republishes*.
        """

    @abstractmethod
    def sweep(self) -> int:
        """Remove messages that are overdue by more than a day from the list; return the number."""

    @abstractmethod
    def purge(self) -> None:
        """Remove all messages with a future due time from the list, for ``delay purge``.

        Other messages may already be in the task queues.
        """
