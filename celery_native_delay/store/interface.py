"""The interface to a store of waiting tasks, which is a Redis or a database.

A row is in one of three states:

- *waiting*: a dispatcher takes the row at its due time, or at its next attempt after a refusal.
- *taken*: a dispatcher publishes the message. If the dispatcher dies, its lease of 30 seconds ends,
  and another dispatcher takes the row.
- *parked*: the broker has refused the message 8 times. It is tried again, at least once an hour.

:class:`Store` is thread-safe. All methods raise StoreUnavailable if the Redis or database does not
answer in time, or refuses the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from copy import copy
from typing import Any, NamedTuple

from ..errors import NoStore
from ..finding import Finding
from ..rates.in_records import RecordedLines
from ..records.interface import Change, RecordName, Records, Snapshot
from ..records.waiting import WaitingTasks
from .entry import StoreEntry
from .joined import UsersTransaction

#: Seconds that a dispatcher has to publish the rows that it took.
LEASE_SECONDS = 30.0

#: Rows that a dispatcher takes at once.
BATCH = 500

#: Refusals of the broker that park a row. After each of them, the dispatcher waits 1, 2, 4, … s,
#: and at most an hour.
REFUSALS_UNTIL_PARKED = 8
LONGEST_PAUSE_SECONDS = 3600.0

#: Between an app's namespace and a virtual host. A namespace has no colon.
_PLACE = ":"

#: The record that names the dispatcher which does most of the work.
_DISPATCHING = RecordName("lease", "dispatching")

#: Seconds that this record stays valid after its dispatcher has renewed it.
LEADING_SECONDS = 5.0


def at_place(namespace: str, place: str) -> str:
    """Return the namespace of the tasks of one virtual host, for example "celery_delay:/"."""
    return f"{namespace}{_PLACE}{place}" if place else namespace


def family_of(namespace: str) -> str:
    """Return the app's namespace, without the virtual host."""
    return namespace.partition(_PLACE)[0]


class Row(NamedTuple):
    """A row to write: its name, its task's id, its due time in microseconds, and its entry."""

    name: str
    task_id: str
    due_us: int
    entry: str

    @classmethod
    def of(cls, entry: StoreEntry) -> Row:
        return cls(entry.name, entry.task_id, entry.due_us, entry.encoded())


class WaitingRow(NamedTuple):
    """A row that waits: *next_us* is its due time, or the next attempt after a refusal."""

    key: Any
    next_us: int
    entry: str


class TakenRow(NamedTuple):
    """A row that a dispatcher has taken, and how often the broker has refused its message."""

    key: Any
    entry: str
    refusals: int


class Taken(NamedTuple):
    """The rows that one call has taken.

    - *token*: names this dispatcher's lease on the rows.
    - *now_us*: the time of the store's clock, in microseconds since the epoch.
    - *next_us*: the due time of the next waiting row; None if no row waits.
    """

    token: str
    rows: Sequence[TakenRow]
    now_us: int
    next_us: int | None


class Refusal(NamedTuple):
    """A taken row whose message the broker refused.

    *pause_us*: microseconds until the next attempt. *parks*: True if the row becomes parked.
    """

    row: TakenRow
    reason: str
    pause_us: int
    parks: bool

    @classmethod
    def of(cls, row: TakenRow, reason: str) -> Refusal:
        pause_seconds = min(2.0 ** min(row.refusals, 30), LONGEST_PAUSE_SECONDS)
        parks = row.refusals + 1 >= REFUSALS_UNTIL_PARKED
        return cls(row, reason[:1000], round(pause_seconds * 1_000_000), parks)


class Census(NamedTuple):
    """Counts of the rows at one moment. Rows whose lease has ended wait.

    - *until_first_us*: microseconds until the first due time, negative if overdue; None if no row
      waits.
    - *promoting*: True if a dispatcher works: it renewed its lease within the last five seconds.
    """

    waiting: int
    taken: int
    parked: int
    overdue: int
    until_first_us: int | None
    promoting: bool


class ParkedRow(NamedTuple):
    """A row that the broker refused, with the broker's last reason."""

    entry: StoreEntry
    reason: str

    @classmethod
    def all_of(cls, rows: Iterable[tuple[str, str]]) -> list[ParkedRow]:
        """Decode entries with their reasons, without those of a later release."""
        found = []
        for entry, reason in rows:
            with suppress(ValueError):
                found.append(cls(StoreEntry.decoded(entry), reason))
        return found


class Store(ABC):
    """The waiting tasks of one app's namespace, and the state of its keys, rates and schedules."""

    where: str
    """The URL of the Redis or database, without its password."""

    namespace: str
    """The app's namespace and the broker's virtual host, as :func:`at_place` joins them."""

    look_seconds: float
    """Seconds between two looks of a dispatcher for rows that other processes have added."""

    def __init__(self) -> None:
        #: Called with the due time of each row that this process has added.
        self.on_add: Callable[[int], object] = lambda due_us: None

    @property
    @abstractmethod
    def state(self) -> Records:
        """The state of keys, rates, schedules and leases. Changes a key and its row at once."""

    def lines(self) -> RecordedLines:
        """Return the lines of rate-limited tasks."""
        return RecordedLines(self.state)

    @abstractmethod
    def tasks(self, delays: Any) -> WaitingTasks:
        """Return an object that lists, cancels and reschedules the waiting tasks.

        *delays* has a method ``check_reach``, which raises DelayTooLong for a far due time.
        """

    @property
    def place(self) -> str:
        """The virtual host of the broker; "" for a broker without virtual hosts."""
        return self.namespace.partition(_PLACE)[2]

    def others(self) -> list[Store]:
        """Return the stores of this app's namespace for other virtual hosts, same connections."""
        family = family_of(self.namespace)
        names = (each for each in self._namespaces() if family_of(each) == family)
        return [self._at(each) for each in names if each != self.namespace]

    def _at(self, namespace: str) -> Store:
        other = copy(self)
        vars(other).pop("state", None)
        other.on_add = lambda due_us: None
        other._use(namespace)
        return other

    @abstractmethod
    def _use(self, namespace: str) -> None:
        """Read and write the rows of *namespace*."""

    @abstractmethod
    def _namespaces(self) -> list[str]:
        """Return all namespaces with rows, and perhaps some without."""

    @abstractmethod
    def prepare(self) -> None:
        """Create the tables if they are missing."""

    @abstractmethod
    def add(self, rows: Sequence[Row]) -> None:
        """Write rows, all or none; a row of the same name is replaced."""

    def users(self) -> UsersTransaction | None:
        """Return the user's open transaction, in which this store reads and writes; else None."""
        return None

    def joining(self, session: Any) -> AbstractContextManager[None]:
        """Read and write in the transaction of a SQLAlchemy session in a ``with`` block.

        Raises NoStore if this store is no database.
        """
        raise NoStore(
            f"expected native_delay_store to be the database of the transaction, got {self.where}: "
            f"set it to the SQLAlchemy URL of that database"
        )

    has_one_transaction: bool = False
    """True if :meth:`one_transaction` works."""

    def one_transaction(self) -> AbstractContextManager[Any]:
        """Open a transaction on the user's own connection in a ``with`` block."""
        raise NotImplementedError(f"{self.where} has no connection of the user")

    def retake(self, token: str) -> Taken:
        """Renew the lease on rows that a transaction of the user has taken with *token*.

        Returns up to :data:`BATCH` rows, in the order in which they were written.
        """
        raise NotImplementedError("a store in Redis joins no transaction")

    @abstractmethod
    def take(self, *, late_us: int = 0) -> Taken:
        """Take due rows, up to :data:`BATCH`, earliest first.

        If *late_us* is above 0, take only rows that are overdue by so many microseconds.
        """

    @abstractmethod
    def release(self, *, parked: bool = False) -> int:
        """Let other dispatchers take the rows whose lease has ended; return their number.

        Parked rows follow when their pause has ended, or all at once if *parked* is True.
        """

    @abstractmethod
    def settle(
        self, taken: Taken, published: Sequence[TakenRow], refused: Sequence[Refusal]
    ) -> None:
        """Delete the published rows; store when the refused rows are tried again.

        Other rows of *taken* are due again at once. A row that was sent again meanwhile stays.
        """

    @abstractmethod
    def census(self) -> Census: ...

    @abstractmethod
    def parked(self, limit: int) -> list[ParkedRow]:
        """Return up to *limit* parked rows, the longest parked ones first."""

    @abstractmethod
    def rows_after(self, row: WaitingRow | None, *, limit: int) -> list[WaitingRow]:
        """Return the next waiting rows, earliest first; from the first one if *row* is None."""

    @abstractmethod
    def remove(self, key: Any, entry: str) -> bool:
        """Delete a waiting row. Returns False if it was taken or changed."""

    @abstractmethod
    def now_us(self) -> int:
        """Return the time of the store's clock, in microseconds since the epoch."""

    @abstractmethod
    def purge(self, *, parked: bool) -> int:
        """Delete all parked rows if *parked* is True, otherwise all waiting rows."""

    @abstractmethod
    def clear(self) -> int:
        """Delete all rows and all state of this namespace; return the number of deleted items."""

    @abstractmethod
    def findings(self) -> list[Finding]:
        """Return problems: the server does not answer, may lose rows, or has a wrong clock."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections. The next call opens new ones."""

    def leave_thread(self) -> None:
        """Close the connection that only the calling thread uses, if there is one."""
        return

    # --- who dispatches ----------------------------------------------------------------------

    def leads(self, dispatcher: str) -> bool:
        """Return True if *dispatcher* has the lease to do most of the work, or now gets it."""

        def renewed(seen: Snapshot) -> Change[bool]:
            if _leader(seen) not in (None, dispatcher):
                return Change(seen.text, seen.now_us, False)
            kept_us = seen.now_us + round(LEADING_SECONDS * 1_000_000)
            # A changed text, because only that is written.
            return Change(f"{dispatcher} {seen.now_us}", kept_us, True)

        return self.state.change(_DISPATCHING, renewed)

    def resign(self, dispatcher: str) -> None:
        """Give the lease of *dispatcher* back, so that another dispatcher leads at once."""

        def given(seen: Snapshot) -> Change[None]:
            text = None if _leader(seen) == dispatcher else seen.text
            return Change(text, seen.now_us, None)

        self.state.change(_DISPATCHING, given)

    def _is_dispatched(self) -> bool:
        return self.state.read(_DISPATCHING).text is not None


def _leader(seen: Snapshot) -> str | None:
    return None if seen.text is None else seen.text.partition(" ")[0]
