"""The interface of records, whichever keeps them: a Redis or a database.

A record is a text under a kind and a name. A pure rule decides about its new text, and about a
message that is put into the broker with it. Both happen in one step, and only if the record is
still as the rule saw it. Beside a broker that cannot be looked into, an index lists the waiting
messages, and a mark tells a worker not to run the message that it received.
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

#: Another caller was quicker so often, each time. Of any number, one always gets through.
TRIES = 100

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
class Looked:
    """A record as it was read at *now_us*, and the waiting *messages* of the task that it names.

    *now_us* is in microseconds since the epoch, by the clock of the records. *text* is None without
    a record. The field ``id`` of a record in JSON names a task. A message is a broker's own name of
    it and its due time in microseconds, 0 if it is parked.
    """

    now_us: int
    text: str | None
    messages: tuple[tuple[Any, int], ...] = ()


@dataclass(frozen=True)
class Change(Generic[T]):
    """A decision about a record: its new *text*, kept until *kept_us*, and the *answer* to give.

    None as text removes the record. A text that stays the same is not written: the record is kept
    as long as before. With *due_us* the caller's message is put into the broker, due then; if it
    *replaces* the messages that the rule saw, those are taken out.
    """

    text: str | None
    kept_us: int
    answer: T
    due_us: int | None = None
    replaces: bool = False


#: A pure rule: it may be called several times.
Decide: TypeAlias = Callable[[Looked], Change[T]]

#: Makes or publishes the caller's message. It gets the due time, the id of the new delivery, and by
#: how much our clock is ahead of the clock of the records, in microseconds.
Put: TypeAlias = Callable[[int, str, int], Any]


@dataclass(frozen=True)
class Listed:
    """A message as the index lists it: *member* is ``<task id>:<delivery id>``.

    *entry* is all that is needed to publish it again, "" for a message that is not to be listed.
    """

    member: str
    due_us: int
    entry: str | bytes


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


def delivery_of(member: str) -> str:
    """The delivery id of a member of the index."""
    return member.rpartition(":")[2]


def tried_again(name: str, attempt: Callable[[], T | None]) -> T:
    """The answer of *attempt* to change the record *name*; None: another caller was quicker."""
    for _ in range(TRIES):
        if (answer := attempt()) is not None:
            return answer
    raise CannotDelay(
        f"the record of {name} was changed by others {TRIES} times while this call looked at it: "
        f"try again, or let fewer producers share a key"
    )


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

    needs_connection = False
    """True if the records go through the connection of the channel that they were asked for."""

    @abstractmethod
    def read(self, name: RecordName) -> Looked:
        """The record as it is now."""

    @abstractmethod
    def change(self, name: RecordName, decide: Decide[T], put: Put | None = None) -> T:
        """Change a record, and put a message into the broker, as *decide* says; its answer.

        *put* makes the message; a rule that asks for none needs none.
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
