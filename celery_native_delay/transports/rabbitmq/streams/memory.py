"""Tasks that wait, by what was read from the streams, and questions about them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice, pairwise
from sys import intern
from typing import NamedTuple

from ....ledger.model import ALL, Page, Query, Waiting
from ..ledger.entry import waiting
from .decisions import Decisions
from .notes import Decision, Noted


class Place(NamedTuple):
    """The place of a message: the rank of its stream, and its offset there."""

    rank: int
    offset: int


class Found(NamedTuple):
    """A task that waits, and where its message stands."""

    task: Waiting
    place: Place


class Memory:
    """Not for several threads at once. *now_us* is in microseconds since the epoch.

    Streams are read each by itself, so a decision may come before the messages that it is about.
    """

    def __init__(self) -> None:
        self.decisions = Decisions()
        self._found: dict[str, Found] = {}
        self._ids: dict[str, tuple[str, ...]] = {}
        #: Copies by what they replace, until it is decided that they do.
        self._pending: dict[str, list[Found]] = {}
        #: Earliest first, of those that were found when it was made; see :meth:`_by_due_time`.
        self._sorted: list[Waiting] = []
        self._unsorted: list[Waiting] = []
        self._has_gone = False

    def __len__(self) -> int:
        return len(self._found)

    # --- what is read --------------------------------------------------------------------

    def add(self, note: Noted, entry: bytes, place: Place, *, now_us: int) -> None:
        """A message that was sent into the levels, and where its *entry* stands."""
        successor = self.decisions.successor
        # Most are over.
        if note.due_us <= now_us or successor(note.delivery_id) is not None:
            return
        found = Found(_slim(waiting(f":{note.delivery_id}", entry, note.due_us)), place)
        old = note.replaces
        if old is None or successor(old) == note.delivery_id:
            self._keep(found)
        elif successor(old) is None:
            self._pending.setdefault(old, []).append(found)

    def decide(self, decision: Decision, *, rank: int, now_us: int) -> None:
        """A decision, as it stands in the stream of *rank*."""
        self.decisions.add(decision, rank=rank, now_ms=now_us // 1000)
        successor = self.decisions.successor(decision.old)
        self._drop(decision.old)
        for found in self._pending.pop(decision.old, ()):
            if found.task.delivery_id == successor:
                self._keep(found)

    def purge(self, rank: int) -> None:
        """Nothing that stands in this stream so far waits any more."""
        for delivery_id in [key for key, found in self._found.items() if found.place.rank == rank]:
            self._drop(delivery_id)

    # --- what is asked -------------------------------------------------------------------

    def find(self, task_id: str, *, now_us: int) -> list[Found]:
        """Messages that wait under this id."""
        found = [self._found[delivery_id] for delivery_id in self._ids.get(task_id, ())]
        return [each for each in found if each.task.due_us > now_us]

    def count(self, query: Query, *, now_us: int) -> int:
        first, end = self._range(query, now_us)
        if query.is_by_time_only:
            return end - first
        return sum(map(query.matches, islice(self._sorted, first, end)))

    def page(self, query: Query = ALL, *, offset: int, limit: int, now_us: int) -> Page:
        first, end = self._range(query, now_us)
        if query.is_by_time_only:
            return Page(tuple(self._sorted[first:end][offset : offset + limit]), end - first)
        matching = filter(query.matches, islice(self._sorted, first, end))
        return Page(tuple(islice(matching, offset, offset + limit)), None)

    def counts(self, edges_us: Sequence[int], *, now_us: int) -> list[int]:
        tasks = self._by_due_time(now_us)
        ends = [bisect_left(tasks, edge_us, key=_due) for edge_us in edges_us]
        return [end - first for first, end in pairwise(ends)]

    def span(self, *, now_us: int) -> tuple[int, int] | None:
        tasks = self._by_due_time(now_us)
        return (tasks[0].due_us, tasks[-1].due_us) if tasks else None

    def _keep(self, found: Found) -> None:
        task = found.task
        # A message that was sent again, or put back for longer, has the delivery id it had.
        self._drop(task.delivery_id)
        self._found[task.delivery_id] = found
        self._ids[task.id] = (*self._ids.get(task.id, ()), task.delivery_id)
        self._unsorted.append(task)

    def _drop(self, delivery_id: str) -> None:
        found = self._found.pop(delivery_id, None)
        if found is None:
            return
        self._has_gone = True
        task_id = found.task.id
        others = tuple(other for other in self._ids[task_id] if other != delivery_id)
        if others:
            self._ids[task_id] = others
        else:
            del self._ids[task_id]

    def _range(self, query: Query, now_us: int) -> tuple[int, int]:
        tasks = self._by_due_time(now_us)
        first = 0 if query.from_us is None else bisect_left(tasks, query.from_us, key=_due)
        if query.until_us is None:
            return first, len(tasks)
        return first, max(first, bisect_left(tasks, query.until_us, key=_due))

    def _by_due_time(self, now_us: int) -> list[Waiting]:
        """All that is due later than now, in order; what is not is dropped."""
        if self._has_gone or self._unsorted:
            self._sorted = [
                task for task in (*self._sorted, *self._unsorted) if self._is_there(task)
            ]
            self._sorted.sort(key=_due)
            self._unsorted, self._has_gone = [], False
        over = bisect_left(self._sorted, now_us + 1, key=_due)
        if over:
            for task in self._sorted[:over]:
                self._drop(task.delivery_id)
            del self._sorted[:over]
            self._has_gone = False
        return self._sorted

    def _is_there(self, task: Waiting) -> bool:
        found = self._found.get(task.delivery_id)
        return found is not None and found.task is task


def _due(task: Waiting) -> int:
    return task.due_us


def _slim(task: Waiting) -> Waiting:
    """*task*, with texts shared that many have."""
    for name in ("name", "queue", "exchange", "routing_key"):
        object.__setattr__(task, name, intern(getattr(task, name)))
    if task.root_id == task.id:
        object.__setattr__(task, "root_id", task.id)
    return task
