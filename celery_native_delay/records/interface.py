"""The interface to the stored state about waiting tasks, in Redis or a database.

For example, the stored state of a debounce key has the id of the task that will run. A pure
function computes the new state, and decides if a message is published. The new state is stored only
if no other process has changed the state meanwhile.

If the message waits in the same Redis or database, both change in one step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from ..errors import CannotDelay

T = TypeVar("T")

#: Attempts to change one stored state while other callers change it. Of several callers that try at
#: the same time, one succeeds.
TRIES = 100

#: Seconds that a command waits for an answer of Redis.
ANSWER_SECONDS = 5.0


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
    - *look*: a function that gets the texts of the cancelled messages before the new one is made.
    """

    text: str | None
    kept_us: int
    answer: T
    due_us: int | None = None
    replaces: bool = False
    look: Callable[[Sequence[str]], object] | None = None


#: A pure function that computes the change of a stored state, and may be called several times.
Decide: TypeAlias = Callable[[Snapshot], Change[T]]

#: A function that makes or publishes the caller's message. The arguments are the due time, the
#: message's delivery id, and the microseconds by which this machine's clock is ahead of the clock
#: of the Redis or database.
Publish: TypeAlias = Callable[[int, str, int], Any]


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


class Records(ABC):
    """Reads and changes the stored state about waiting tasks. Thread-safe.

    Methods raise StoreUnavailable if the Redis or database cannot be reached.
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
