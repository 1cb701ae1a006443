"""Searches, counts, cancels and reschedules waiting tasks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from itertools import islice
from tempfile import TemporaryFile
from typing import Any, NamedTuple, TypeAlias, overload

from ..due_time import told
from ..errors import CannotDelay, DelayTooLong
from .search import Word, is_itself_in_json, parse

#: The header with a rate-limited task's place (a number) in each of its lines, as a JSON object. A
#: line is the waiting tasks with the same rate limit and key.
PLACE = "native_delay_place"

#: The header with the name of the Spark run that has sent the task.
RUN = "native_delay_run"

#: The header of a task that a hold keeps waiting, as :class:`Held` writes it.
HELD = "native_delay_held"

#: Due times from here on, in microseconds since the epoch (the year 2100), are those of held tasks.
HELD_FROM_US = 4_102_444_800_000_000


class Held(NamedTuple):
    """Tells which hold keeps a task waiting, by whom, and the task's due time before."""

    hold: str
    by: str
    due_us: int

    @classmethod
    def of(cls, header: object) -> Held | None:
        """Parse the header; None without one, or if it is malformed."""
        try:
            hold, by, due_us = json.loads(header)  # type: ignore[arg-type]
            return cls(str(hold), str(by), int(due_us))
        except (TypeError, ValueError):
            return None

    @property
    def header(self) -> str:
        return json.dumps(self)


#: The attributes of a task in JSON, in this order.
_IN_JSON = (
    *("id", "name", "args", "kwargs", "key", "kind", "queue", "exchange", "routing_key", "due"),
    *("retries", "root_id", "run", "delivery_id", "held"),
)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that waits in the broker until its due time.

    - *id*: the task id, or the correlation id if the message is not a Celery task.
    - *name*: the task name, or "" if the message is not a Celery task.
    - *args* and *kwargs*: the arguments as texts (``repr``), as in Celery's events.
    - *queue*: the task's queue, or "" if an exchange routes the message at the due time.
    - *due_us*: the due time in microseconds since the epoch.
    - *keeps_result*: False if the task ignores its result (``ignore_result``).
    - *key* and *kind*: for example "user:7" and "debounce"; both "" for a task without a key.
    - *place*: the header ``native_delay_place`` of a waiting rate-limited task, or "".
    - *run*: the name of the Spark run that has sent the task, or "".
    - *held*: the hold of a held task, who held it, and the due time before; None if not held.
    - *origin* and *parent_id*: the process and the task that sent it; "" if unknown.
    - *refusal*: why the broker refused the due task, as ``Delay.show`` tells it; else "".
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
    run: str = ""
    held: Held | None = None
    origin: str = ""
    parent_id: str = ""
    refusal: str = ""

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
        """Make a waiting message from the headers and properties of an AMQP message."""
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
            number_of(headers.get("retries")),
            str(headers.get("root_id") or ""),
            delivery_id,
            not headers.get("ignore_result"),
            key,
            kind,
            str(headers.get(PLACE) or ""),
            str(headers.get(RUN) or ""),
            Held.of(headers.get(HELD)),
            str(headers.get("origin") or ""),
            str(headers.get("parent_id") or ""),
        )

    @property
    def due(self) -> datetime:
        """The due time as a datetime in UTC, with time zone. If held, that before the hold."""
        due_us = self.due_us if self.held is None else self.held.due_us
        return datetime.fromtimestamp(due_us / 1_000_000, UTC)

    def as_json(self) -> dict[str, Any]:
        """Return the task as a dict, for the option ``--json`` and for Flower's REST API."""
        return {name: getattr(self, name) for name in _IN_JSON} | {
            "due": self.due.isoformat(timespec="milliseconds"),
            "held": f"{self.held.hold}, by {self.held.by}" if self.held else "",
        }


def number_of(value: Any) -> int:
    """Convert the value of a message header to a number; 0 if invalid."""
    try:
        return int(value or 0)
    except (TypeError, ValueError, OverflowError):
        return 0


@dataclass(frozen=True)
class Query:
    """A search for waiting tasks. A task matches if all conditions hold.

    Each field is one condition. A field that is None or () is no condition.

    - *words*: the words of the search text. The task must match all words.
    - *name*, *queue* and *run*: the exact name, queue and Spark run of the task.
    - *from_us*: the earliest due time in microseconds since the epoch.
    - *until_us*: a time in microseconds since the epoch; the task is due before this time.
    - *hold*: the name of the hold that keeps the task waiting.
    """

    words: tuple[Word, ...] = ()
    name: str | None = None
    queue: str | None = None
    from_us: int | None = None
    until_us: int | None = None
    run: str | None = None
    hold: str | None = None

    @classmethod
    def parse(cls, text: str) -> Query:
        """Parse the text of a search: words, quoted texts, ``field:word``.

        Raises:
            InvalidQuery: a quote is not closed, a field has no word, or a word begins with ``-``.
        """
        return cls(parse(text))

    def due_within(self, from_us: int | None, until_us: int | None) -> Query:
        """Return a copy of this search with another range of due times, in microseconds."""
        return replace(self, from_us=from_us, until_us=until_us)

    @property
    def is_by_time_only(self) -> bool:
        """True if this search has no condition except the due time."""
        return not (self.words or self.name or self.queue or self.run or self.hold)

    @property
    def needle(self) -> str:
        """A lower-case text by which Redis or the database preselects tasks, ignoring case.

        Every matching task contains this text. The text "" selects all tasks.
        """
        texts = [word.needle for word in self.words]
        texts += [text.lower() for text in (self.name, self.queue, self.run) if text]
        return max(filter(is_itself_in_json, texts), key=len, default="")

    def matches(self, task: Waiting) -> bool:
        """Return True if *task* fulfils all conditions of this search."""
        return (
            (self.name is None or task.name == self.name)
            and (self.queue is None or task.queue == self.queue)
            and (self.run is None or task.run == self.run)
            and (self.from_us is None or task.due_us >= self.from_us)
            and (self.until_us is None or task.due_us < self.until_us)
            and (self.hold is None or (task.held is not None and task.held.hold == self.hold))
            and all(word.matches(task) for word in self.words)
        )


#: The search that matches every waiting task.
ALL = Query()


@dataclass(frozen=True)
class WaitingPage(Sequence[Waiting]):
    """Waiting tasks, earliest due time first, and the total number of matching tasks.

    *total* is None if the matching tasks were not counted.
    """

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
    """A bar of a histogram: the number of tasks due from *from_us* until *until_us*.

    Both times are in microseconds since the epoch. *until_us* is exclusive.
    """

    from_us: int
    until_us: int
    count: int


#: Widths of a histogram's bars in seconds: round numbers of seconds, minutes, hours and days.
_WIDTHS = (
    *(1, 2, 5, 10, 15, 30),
    *(minutes * 60 for minutes in (1, 2, 5, 10, 15, 30)),
    *(hours * 3600 for hours in (1, 2, 3, 6, 12)),
    *(days * 86_400 for days in (1, 2, 7, 14, 28, 91, 182, 364)),
)


def edges(first_us: int, last_us: int, *, bars: int) -> list[int]:
    """Return round times, in microseconds, as the edges of at most *bars* bars of a histogram."""
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
    """The possible results of cancelling or rescheduling a task."""

    DONE = "done"
    """The task was cancelled or rescheduled."""
    NOTED = "noted"
    """The task is not listed. It will not run if it still waits in the broker."""
    TOO_LATE = "too late"
    """The task was delivered before the change, or is about to be delivered."""
    UNKNOWN = "unknown"
    """No task with this id is waiting. The task is already due, or was never delayed."""
    IMPOSSIBLE = "impossible"
    """The task cannot be changed, and keeps waiting. The outcome's *reason* says why."""


@dataclass(frozen=True)
class Outcome:
    """The result of cancelling or rescheduling a task; truthy if the change was made.

    - *id*: the task id.
    - *verdict*: done, noted, too late, unknown or impossible; see :class:`Verdict`.
    - *due_us*: the new due time in microseconds since the epoch; None if not rescheduled.
    - *tasks*: the waiting messages with this task id, as they were before the change.
    - *reason*: a text that explains why the task was not changed, or "".
    """

    id: str
    verdict: Verdict
    due_us: int | None = None
    tasks: tuple[Waiting, ...] = ()
    reason: str = ""

    def __bool__(self) -> bool:
        return self.verdict in (Verdict.DONE, Verdict.NOTED)

    def __str__(self) -> str:
        match self.verdict:
            case Verdict.DONE if self.due_us is None:
                return f"{self.id} cancelled"
            case Verdict.DONE:
                return f"{self.id} is due {told(self.due_us or 0)}"
            case Verdict.NOTED:
                return f"{self.id}: noted, it will not run if it still waits in the broker"
            case Verdict.TOO_LATE:
                return f"{self.id}: too late, {self.reason or 'it was delivered meanwhile'}"
        reason = self.reason or "nothing waits under this id"
        return f"{self.id}: {reason}" if self.id else reason


#: Returns the new due time of a waiting message in microseconds since the epoch; None means now.
DueTime: TypeAlias = Callable[[Waiting], int | None]

#: Returns a changed copy of a waiting message, a StoreEntry.
Edit: TypeAlias = Callable[[Any], Any]


class Found(NamedTuple):
    """A waiting message: the id that was asked for, its name, its content as stored, its task."""

    task_id: str
    name: Any
    entry: Any
    task: Waiting


class Replacement(NamedTuple):
    """The new content and due time of a message whose content is *entry*; "" removes it."""

    name: Any
    entry: Any
    due_us: int
    content: str


class WaitingTasks(ABC):
    """Lists, searches, cancels and reschedules the waiting tasks of one broker.

    Every method may raise StoreUnavailable.
    """

    note_elsewhere: Callable[[str], None] | None = None
    """A function that makes a cancel durable for a task that is not listed, as it waits in the
    broker; None if all waiting tasks are listed."""

    _delays: Any
    """The object that checks a due time against the broker's longest delay."""

    def count(self, query: Query = ALL) -> int:
        """Return the number of waiting tasks that match a search."""
        if query.is_by_time_only:
            return self._count(query.from_us, query.until_us)
        return sum(1 for _ in self.all(query))

    def page(self, query: Query = ALL, *, offset: int = 0, limit: int = 50) -> WaitingPage:
        """Return up to *limit* tasks that match a search, earliest first. Skip *offset* tasks."""
        if not query.is_by_time_only:
            return WaitingPage(tuple(islice(self.all(query), offset, offset + limit)), None)
        # The page is filled up from the next rows if some are not shown.
        tasks = self.all(query, offset=offset, chunk=max(1, min(limit, AT_ONCE)))
        return WaitingPage(tuple(islice(tasks, limit)), self.count(query))

    def ids(self, query: Query = ALL) -> Iterator[str]:
        """Yield the ids of all waiting tasks that match a search, as :meth:`all` does."""
        return (task.id for task in self.all(query))

    def all(
        self, query: Query = ALL, *, offset: int = 0, chunk: int | None = None
    ) -> Iterator[Waiting]:
        """Yield all waiting tasks that match a search, earliest due time first.

        Each task that waits all the time is yielded, whatever happens to others meanwhile. A task
        may be yielded twice. *offset* skips rows, not matching tasks. *chunk* rows are read at a
        time; None: :data:`AT_ONCE`.
        """
        after = None
        while True:
            tasks, after = self._read(query, after, offset=offset, limit=chunk or AT_ONCE)
            yield from filter(query.matches, tasks)
            if after is None:
                return
            offset = 0

    @abstractmethod
    def _count(self, from_us: int | None, until_us: int | None) -> int:
        """Return the number of tasks that are due in a range of time; None: without this bound."""

    @abstractmethod
    def _read(
        self, query: Query, after: Any, *, offset: int, limit: int
    ) -> tuple[list[Waiting], Any]:
        """Read the next *limit* rows in a search's range of time, earliest first.

        The tasks contain ``query.needle``. Returns the tasks, and the last row, to go on after it:
        a number of rows would be wrong as soon as an earlier row is gone. None: there are no more.
        """

    def get(self, task_id: str) -> list[Waiting]:
        """Return the task's waiting messages: usually one, none if the task is not waiting."""
        return [found.task for found in self._found([task_id])]

    @abstractmethod
    def counts(self, edges_us: Sequence[int]) -> list[int]:
        """Count the tasks due in each interval between two neighbouring times of *edges_us*."""

    @abstractmethod
    def span(self) -> tuple[int, int] | None:
        """Return the earliest and the latest due time in microseconds since the epoch.

        Returns None if no task is waiting.
        """

    def close(self) -> None:  # noqa: B027  most have nothing to close
        """Close the connections that this object has opened."""

    def cancel(self, task_ids: Sequence[str]) -> list[Outcome]:
        """Cancel tasks. A worker receives each message at once, and reports the task as revoked."""
        outcomes = self._change(task_ids, lambda task: None, cancelled=True)
        if self.note_elsewhere is not None:
            for at, outcome in enumerate(outcomes):
                if outcome.verdict is Verdict.UNKNOWN:
                    self.note_elsewhere(outcome.id)
                    outcomes[at] = Outcome(outcome.id, Verdict.NOTED)
        return outcomes

    def move(
        self, task_ids: Sequence[str], due_us: DueTime, edit: Edit | None = None
    ) -> list[Outcome]:
        """Give tasks new due times; *due_us* is asked in the order of *task_ids*.

        *edit* changes the messages themselves. The verdict for a task that cannot get this due time
        is "impossible", for example as it is too far away, or as the message is no Celery task. For
        a single task, this raises DelayTooLong or CannotDelay instead.
        """
        return self._change(task_ids, due_us, cancelled=False, edit=edit)

    def move_all(self, query: Query, by_us: int, now_us: int) -> int:
        """Move the due times of all tasks that match a search; return the number of moved tasks.

        A due time before *now_us* becomes now. Raises DelayTooLong, and moves no task, if a new due
        time is too far away.
        """
        # In a file, as a moved task would be found again, and memory may not hold two million.
        with TemporaryFile("w+") as noted:
            due_us = now_us
            for task in self.all(query):
                if task.held:  # it has no due time
                    continue
                due_us = max(task.due_us + by_us, due_us)
                noted.write(f"{task.due_us + by_us} {task.id}\n")
            self._delays.check_reach(due_us)
            noted.seek(0)
            lines = (line.rstrip("\n").split(" ", 1) for line in noted)
            moved = 0
            while due := {task_id: int(at) for at, task_id in islice(lines, AT_ONCE)}:
                rule = partial(_later_than, now_us, due)
                moved += sum(map(bool, self.move(list(due), rule)))
            return moved

    @abstractmethod
    def _now_us(self) -> int:
        """Return the time of the store's clock, in microseconds since the epoch."""

    @abstractmethod
    def _found(self, task_ids: Collection[str]) -> Iterable[Found]:
        """Return the waiting messages with these task ids; those of one id, earliest first."""

    @abstractmethod
    def _changed(self, entry: Any, due_us: int, edit: Edit | None, *, cancelled: bool) -> str:
        """Return the content of a cancelled or rescheduled message; "" to remove the message."""

    @abstractmethod
    def _replace(self, new: Sequence[Replacement], *, cancelled: bool) -> Collection[Any]:
        """Replace waiting messages, and return the names of those that were replaced.

        The others were delivered or changed in the meantime.
        """

    def taken(self, task_ids: Collection[str]) -> Collection[str]:
        """Return the tasks of *task_ids* that a dispatcher is publishing at this moment."""
        return ()

    def _change(
        self, task_ids: Sequence[str], due_us: DueTime, *, cancelled: bool, edit: Edit | None = None
    ) -> list[Outcome]:
        seen: dict[str, dict[Any, Waiting]] = {task_id: {} for task_id in task_ids}
        order = {task_id: place for place, task_id in enumerate(seen)}
        #: By task, the names of the changed messages, and their due times.
        made: dict[str, dict[Any, int]] = {task_id: {} for task_id in seen}
        refused: dict[str, str] = {}
        left: Collection[str] = order
        for _ in range(_TRIES):
            found = sorted(self._found(left), key=lambda each: order[each.task_id])
            now_us = self._now_us()
            new: dict[Replacement, str] = {}
            for task_id, name, entry, task in found:
                if name in made[task_id] or task_id in refused:
                    continue
                seen[task_id].setdefault(name, task)
                try:
                    at_us = due_us(task)
                    if at_us is not None and at_us != task.due_us:
                        self._delays.check_reach(at_us)
                    at_us = now_us if at_us is None else at_us
                    content = self._changed(entry, at_us, edit, cancelled=cancelled)
                except (CannotDelay, DelayTooLong) as exc:
                    if len(seen) == 1:
                        raise
                    refused[task_id] = str(exc)
                else:
                    new[Replacement(name, entry, at_us, content)] = task_id
            if not new:
                break
            done = set(self._replace(list(new), cancelled=cancelled))
            for one, task_id in new.items():
                if one.name in done:
                    made[task_id][one.name] = one.due_us
            left = {task_id for one, task_id in new.items() if one.name not in done}
            if not left:
                break
        unseen = [task_id for task_id, tasks in seen.items() if not tasks]
        taken = self.taken(unseen) if unseen else ()
        return [
            _outcome(
                task_id,
                tuple(seen[task_id].values()),
                made=list(made[task_id].values()),
                cancelled=cancelled,
                refused=refused.get(task_id),
                taken=task_id in taken,
            )
            for task_id in task_ids
        ]


def _outcome(
    task_id: str,
    tasks: tuple[Waiting, ...],
    *,
    made: Sequence[int],
    cancelled: bool,
    refused: str | None,
    taken: bool,
) -> Outcome:
    if made:
        return Outcome(task_id, Verdict.DONE, None if cancelled else made[-1], tasks)
    if refused is not None:
        return Outcome(task_id, Verdict.IMPOSSIBLE, None, tasks, refused)
    return Outcome(task_id, Verdict.TOO_LATE if tasks or taken else Verdict.UNKNOWN, None, tasks)


def _later_than(now_us: int, due_us: Mapping[str, int], task: Waiting) -> int | None:
    return due_us[task.id] if due_us[task.id] > now_us else None


#: Attempts to change a task that other processes change at the same time.
_TRIES = 10

#: Tasks that one script or transaction reads or changes: so many keep others waiting for
#: milliseconds.
AT_ONCE = 500


def histogram(tasks: WaitingTasks, *, bars: int = 40) -> list[Bar]:
    """Return a histogram of due times, with at most *bars* bars; empty if no task is waiting."""
    span = tasks.span()
    due = Query(until_us=HELD_FROM_US)
    number = tasks.count(due) if span and span[1] >= HELD_FROM_US else 1
    if span is None or not number:
        return []
    if span[1] >= HELD_FROM_US:  # the bars show when tasks are due, and held ones are not
        last = tasks.page(due, offset=number - 1, limit=1).tasks  # () if one has left meanwhile
        span = span[0], last[-1].due_us if last else span[0]
    found = edges(*span, bars=bars)
    counts = tasks.counts(found)
    return [Bar(*bar) for bar in zip(found, found[1:], counts, strict=False)]
