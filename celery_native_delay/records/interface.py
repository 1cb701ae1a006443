"""The interface of records, whichever keeps them: a Redis or a database.

A record is a text under a kind and a name. A pure rule decides about its new text, which is written
only if the record still is as the rule saw it. Beside a broker that cannot be looked into, an index
lists the waiting messages, and a mark tells a worker not to run the message that it received.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from .waiting import WaitingTasks

T = TypeVar("T")

#: Seconds that publishing and receiving wait for the records: to connect, and for an answer.
PATIENCE_SECONDS = 0.3

#: The same where people and keyed calls ask, who wait longer.
ANSWER_SECONDS = 5.0

#: Seconds for which records that failed are left alone: the first time, and at most.
LEFT_ALONE_SECONDS = (1.0, 30.0)

#: A mark outlives the due time of its message by so much, in ms: a message may lie in its queue for
#: that long before a worker asks about it.
MARK_GRACE_MS = 30 * 86_400_000

#: An entry of the index that is overdue by so much has lost its message, or its worker could not
#: tell us.
STALE_AFTER_US = 86_400_000_000

#: The mark of a message that no worker must run.
VOID = "void"

#: The mark of a message whose place is not decided yet. It is void if a worker gets it before.
UNDECIDED = "undecided"


class RecordName(NamedTuple):
    """The name of a record among those of its *kind*, such as "key" or "rate"."""

    kind: str
    name: str


@dataclass(frozen=True)
class Change(Generic[T]):
    """A decision about a record: its new *text*, kept until *kept_us*, and the *answer* to give.

    None as text removes the record. *kept_us* counts microseconds since the epoch, by the clock of
    the records. A text that stays the same is not written: the record is kept as long as before.
    """

    text: str | None
    kept_us: int
    answer: T


@dataclass(frozen=True)
class Looked:
    """A record as it was read at *now_us*, and the *messages* of the task that it names.

    Messages are members of the index with their due times in microseconds.
    *text* is None without a record. The field ``id`` of a record in JSON names a task.
    """

    now_us: int
    text: str | None
    messages: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Listed:
    """A message as the index lists it: *member* is ``<task id>:<delivery id>``.

    *entry* is all that is needed to publish it again, "" for a message that is not to be listed.
    """

    member: str
    due_us: int
    entry: str


@dataclass(frozen=True)
class CompareAndSet:
    """One step that is done as a whole or not at all.

    The record *name* must still read *before*, and the messages *gone* must still be listed. Then
    the record reads *after* until *kept_ms* from now, the messages *gone* are void, and the new
    message counts, which was marked as undecided. Otherwise the new message is void.
    """

    name: RecordName | None = None
    before: str | None = None
    after: str | None = None
    kept_ms: int = 0
    new: Listed | None = None
    gone: Sequence[str] = ()


class Standing(Enum):
    """The standing of a message that waits."""

    KNOWN = "known"
    VOID = "void"
    """Its task was cancelled or moved."""
    UNKNOWN = "unknown"


class Records(ABC):
    """Records by name, for any thread. Methods raise RecordsUnavailable while those are away."""

    where: str
    """The URL, without its password."""

    @abstractmethod
    def change(self, name: RecordName, decide: Callable[[str | None, int], Change[T]]) -> T:
        """Change a record as *decide* says, and return its answer.

        *decide* gets the text of the record, None without one, and the time in microseconds since
        the epoch by the clock of the records. It may be called several times.
        """

    @abstractmethod
    def load(self, names: Sequence[RecordName]) -> list[str | None]:
        """The texts of these records, None for each that does not exist."""

    @abstractmethod
    def latest(self, kind: str, limit: int) -> tuple[int, list[tuple[str, str]]]:
        """The time in microseconds, and names and texts of the records that are kept longest."""

    @abstractmethod
    def close(self) -> None:
        """Give the connections up; the next use makes others."""


class Index(ABC):
    """An index of the messages that wait on a broker which cannot be looked into."""

    missed: int
    """Number of messages that could not be noted or asked about."""

    @abstractmethod
    def note(self, listed: Listed) -> None:
        """Note a message that is about to wait. Never fails, hardly ever waits."""

    @abstractmethod
    def forget(self, member: str) -> None:
        """Strike a message that could not be sent. Never fails, hardly ever waits."""

    @abstractmethod
    def received(self, member: str) -> bool | None:
        """True if a worker may run the message, which is not listed any more; None: no answer."""

    @abstractmethod
    def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until what was noted is there, or *timeout_seconds* are over."""

    @abstractmethod
    def look(self, name: RecordName | None, undecided: str | None, mark_ms: int) -> Looked:
        """Read a record, and mark the delivery *undecided*, if any, for *mark_ms*."""

    @abstractmethod
    def unmark(self, delivery_id: str, left_ms: int = 0) -> None:
        """Remove the mark of a delivery, or keep it for *left_ms*."""

    @abstractmethod
    def compare_and_set(self, step: CompareAndSet) -> bool:
        """Do *step*; False if not all was as it says."""

    @abstractmethod
    def standing(self, member: str) -> Standing:
        """The standing of a message; asking changes nothing."""

    @abstractmethod
    def tasks(self, republishes: Any) -> WaitingTasks:
        """The tasks that are listed, whose messages *republishes*, a transport's part, can read."""

    @abstractmethod
    def sweep(self) -> int:
        """Remove entries whose messages were lost long ago; their number."""

    @abstractmethod
    def purge(self) -> None:
        """Remove all entries that are not due yet."""
