"""Waiting tasks, questions about them, and their answers. Pure: time is an argument."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, overload

from .search import Word, is_itself_in_json, parse

#: The header in which a rate-limited task keeps its place in a line: ``<place> <key>``.
PLACE = "native_delay_place"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that waits. *args* and *kwargs* are their reprs, as Celery's events have them.

    *queue* is where it goes, "" where only the exchange knows; *due_us* is in microseconds since
    the epoch. What is no Celery task has no *name*, and an *id* only by its correlation id. *key*
    and *kind* are those of the call that sent it under a key, such as "user:7" and "debounce", else
    "".
    """

    id: str
    name: str
    args: str
    kwargs: str
    queue: str
    exchange: str
    routing_key: str
    due_us: int
    retries: int
    root_id: str
    delivery_id: str
    keeps_result: bool = True
    key: str = ""
    kind: str = ""
    place: str = ""

    @classmethod
    def of(
        cls,
        headers: Mapping[str, Any],
        properties: Mapping[str, Any],
        *,
        queue: str,
        exchange: str,
        routing_key: str,
        due_us: int,
        delivery_id: str,
        key: str,
        kind: str,
    ) -> Waiting:
        """The message with these headers and properties, of task protocol 2 or of any other."""
        task_id = headers.get("id") or properties.get("correlation_id") or delivery_id
        return cls(
            str(task_id),
            str(headers.get("task") or ""),
            str(headers.get("argsrepr") or ""),
            str(headers.get("kwargsrepr") or ""),
            queue,
            exchange,
            routing_key,
            due_us,
            _number(headers.get("retries")),
            str(headers.get("root_id") or ""),
            delivery_id,
            not headers.get("ignore_result"),
            key,
            kind,
            str(headers.get(PLACE) or ""),
        )

    @property
    def due(self) -> datetime:
        """The due time, in UTC."""
        return datetime.fromtimestamp(self.due_us / 1_000_000, UTC)

    def as_json(self) -> dict[str, Any]:
        """Plain data for ``--json`` and for Flower's REST."""
        return {
            "id": self.id,
            "name": self.name,
            "args": self.args,
            "kwargs": self.kwargs,
            "key": self.key,
            "kind": self.kind,
            "queue": self.queue,
            "exchange": self.exchange,
            "routing_key": self.routing_key,
            "due": self.due.isoformat(timespec="milliseconds"),
            "retries": self.retries,
            "root_id": self.root_id,
            "delivery_id": self.delivery_id,
        }


def _number(value: Any) -> int:
    """0 for none: in what is no task of Celery's, a header may mean anything."""
    try:
        return int(value or 0)
    except (TypeError, ValueError, OverflowError):
        return 0


@dataclass(frozen=True)
class Query:
    """A choice of the waiting tasks: those that match all *words* and are due in the range.

    *from_us* is included, *until_us* is not; None is without limit. *name* and *queue* must be
    exactly so.
    """

    words: tuple[Word, ...] = ()
    name: str | None = None
    queue: str | None = None
    from_us: int | None = None
    until_us: int | None = None

    @classmethod
    def parse(cls, text: str) -> Query:
        """The query in the text of a search box: words, quoted texts, ``field:word``.

        Raises:
            InvalidQuery: a quote is left open, a field has no word, or a word begins with ``-``.
        """
        return cls(parse(text))

    def due_within(self, from_us: int | None, until_us: int | None) -> Query:
        """This query, of those due from *from_us* until before *until_us*."""
        return replace(self, from_us=from_us, until_us=until_us)

    @property
    def is_by_time_only(self) -> bool:
        """True if due times alone decide."""
        return not (self.words or self.name or self.queue)

    @property
    def needle(self) -> str:
        """The longest text, in lower case, that the store can look for; "" for none.

        Every stored message that matches contains it, in any case.
        """
        texts = [word.needle for word in self.words]
        texts += [text.lower() for text in (self.name, self.queue) if text]
        return max(filter(is_itself_in_json, texts), key=len, default="")

    def matches(self, task: Waiting) -> bool:
        """True if *task* is one of them."""
        return (
            (self.name is None or task.name == self.name)
            and (self.queue is None or task.queue == self.queue)
            and (self.from_us is None or task.due_us >= self.from_us)
            and (self.until_us is None or task.due_us < self.until_us)
            and all(word.matches(task) for word in self.words)
        )


#: Everything that waits.
ALL = Query()


@dataclass(frozen=True)
class Page(Sequence[Waiting]):
    """A few of the waiting, earliest first, and how many match in all; None: not counted."""

    tasks: tuple[Waiting, ...]
    total: int | None

    @overload
    def __getitem__(self, index: int) -> Waiting: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Waiting, ...]: ...
    def __getitem__(self, index: int | slice) -> Waiting | tuple[Waiting, ...]:
        return self.tasks[index]

    def __len__(self) -> int:
        return len(self.tasks)


@dataclass(frozen=True)
class Bar:
    """The number of tasks due from *from_us* until *until_us*, microseconds since the epoch."""

    from_us: int
    until_us: int
    count: int


#: Seconds that a bar may be wide: what people count in.
_WIDTHS = (
    *(1, 2, 5, 10, 15, 30),
    *(minutes * 60 for minutes in (1, 2, 5, 10, 15, 30)),
    *(hours * 3600 for hours in (1, 2, 3, 6, 12)),
    *(days * 86_400 for days in (1, 2, 7, 14, 28, 91, 182, 364)),
)


def edges(first_us: int, last_us: int, *, bars: int) -> list[int]:
    """Times at which the bars of a histogram begin and end: round ones, for *bars* at most."""
    span_us = max(last_us - first_us, 1)
    for width in _WIDTHS:
        width_us = width * 1_000_000
        start_us = first_us // width_us * width_us
        count = (last_us - start_us) // width_us + 1
        if count <= bars:
            break
    else:
        count, start_us = bars, first_us
        width_us = span_us // bars + 1
    return [start_us + number * width_us for number in range(count + 1)]


class Verdict(Enum):
    """The outcome of a wish to cancel or move a task, in one word."""

    DONE = "done"
    TOO_LATE = "too late"
    """It was there, and was handed over before it could be changed, or is about to be."""
    UNKNOWN = "unknown"
    """Nothing waits under this id: its time has come, or it never waited."""
    IMPOSSIBLE = "impossible"
    """It waits as it did: what is no task of protocol 2 cannot be moved on Redis."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a wish to cancel or move the task *id*; true if it was done.

    *due_us* is when it is due now, None if it is not. *tasks* are what it was about, as it was;
    *reason* says why it was not done, "" for the usual one of its verdict.
    """

    id: str
    verdict: Verdict
    due_us: int | None = None
    tasks: tuple[Waiting, ...] = ()
    reason: str = ""

    def __bool__(self) -> bool:
        return self.verdict is Verdict.DONE

    def __str__(self) -> str:
        match self.verdict:
            case Verdict.DONE if self.due_us is None:
                return f"{self.id} cancelled"
            case Verdict.DONE:
                due = datetime.fromtimestamp((self.due_us or 0) / 1_000_000, UTC)
                return f"{self.id} is due {due.isoformat(timespec='milliseconds')}"
            case Verdict.TOO_LATE:
                return f"{self.id}: too late, {self.reason or 'it was handed over meanwhile'}"
        reason = self.reason or "nothing waits under this id"
        return f"{self.id}: {reason}" if self.id else reason


class WaitingTasks(ABC):
    """The tasks that wait on one broker, by due time; each is changed in one step.

    Every method may raise RecordsUnavailable.
    """

    _delays: Any
    """Those of the broker's channel, which know how long a message can wait."""

    @abstractmethod
    def count(self, query: Query = ALL) -> int:
        """The number of those that match."""

    @abstractmethod
    def page(self, query: Query = ALL, *, offset: int = 0, limit: int = 50) -> Page:
        """Matching tasks, earliest first, from the *offset*-th on."""

    def ids(self, query: Query = ALL) -> Iterator[str]:
        """The ids of all that match, earliest first, never many at a time; some more than once."""
        return ids_by_page(self.page, query)

    def get(self, task_id: str) -> list[Waiting]:
        """Messages that wait under this id: most often one, none if it does not wait."""
        return [task for _, _, task in self._found(task_id)]

    @abstractmethod
    def counts(self, edges_us: Sequence[int]) -> list[int]:
        """Numbers of those that are due between each two neighbours of *edges_us*."""

    @abstractmethod
    def span(self) -> tuple[int, int] | None:
        """Due times of the first and the last; None if nothing waits."""

    def close(self) -> None:  # noqa: B027  nothing to do where nothing is held
        """Give up what was held to answer."""

    def cancel(self, task_id: str) -> Outcome:
        """Cancel the task: its message is handed over at once, for a worker to announce."""
        return self._change(task_id, None, cancelled=True)

    def move(self, task_id: str, due_us: int | None) -> Outcome:
        """Make it due then instead, None for now.

        DelayTooLong, CannotDelay: it cannot wait that long; it is due when it was.
        """
        if due_us is not None:
            self._delays.check_reach(due_us)
        return self._change(task_id, due_us, cancelled=False)

    @abstractmethod
    def _found(self, task_id: str) -> list[tuple[Any, Any, Waiting]]:
        """Members and entries under *task_id*, and the tasks that people see."""

    @abstractmethod
    def _replace(
        self, member: Any, entry: Any, task: Waiting, due_us: int | None, *, cancelled: bool
    ) -> tuple[Any, int] | None:
        """The member that replaced this one and its due time; None if a worker was quicker."""

    def _change(self, task_id: str, due_us: int | None, *, cancelled: bool) -> Outcome:
        """Replace everything that waits under *task_id*, to be due then; None for now."""
        seen: dict[Any, Waiting] = {}
        #: Members that are as they were to be.
        made: set[Any] = set()
        is_due_us = due_us
        for _ in range(_TRIES):
            found = [each for each in self._found(task_id) if each[0] not in made]
            if not found:
                break
            for member, entry, task in found:
                seen.setdefault(member, task)
                new = self._replace(member, entry, task, due_us, cancelled=cancelled)
                if new is not None:
                    made.add(new[0])
                    is_due_us = new[1]
        tasks = tuple(seen.values())
        if made:
            return Outcome(task_id, Verdict.DONE, None if cancelled else is_due_us, tasks)
        return Outcome(task_id, Verdict.TOO_LATE if seen else Verdict.UNKNOWN, None, tasks)


#: A change is tried again so often when another has changed the task at the same time.
_TRIES = 10

#: Ids read at a time.
IDS_AT_ONCE = 1000


def ids_by_page(page_of: Callable[..., Page], query: Query) -> Iterator[str]:
    """:meth:`WaitingTasks.ids` by pages; messages that leave meanwhile shift nothing."""
    skipped = 0
    while True:
        page = page_of(query, offset=skipped, limit=IDS_AT_ONCE).tasks
        for task in page:
            yield task.id
        if len(page) < IDS_AT_ONCE:
            return
        last_us = page[-1].due_us
        begins_there = query.from_us == last_us
        skipped = sum(task.due_us == last_us for task in page) + skipped * begins_there
        query = query.due_within(last_us, query.until_us)


def histogram(tasks: WaitingTasks, *, bars: int = 40) -> list[Bar]:
    """The spread of due times, in *bars* bars at most; empty if nothing waits."""
    span = tasks.span()
    if span is None:
        return []
    found = edges(*span, bars=bars)
    counts = tasks.counts(found)
    return [Bar(*bar) for bar in zip(found, found[1:], counts, strict=False)]
