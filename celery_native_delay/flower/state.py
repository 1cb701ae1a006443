"""Flower's picture of the cluster, in which a task that waits in the broker is DELAYED.

Monitors learn of a task when it is sent, if its app says so at all, and forget it on their restart.
Here the records tell; events say what happens to the task afterwards, as ever. No event of our own
is sent: Celery would rank its state above REVOKED, and take its sender for a worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cached_property
from time import time
from typing import Any
from weakref import WeakSet

from celery import states
from celery.events.state import Task
from flower.events import EventsState

from ..due_time import due_us
from ..errors import InvalidDueTime
from ..records.waiting import Outcome, Waiting

DELAYED = "DELAYED"

#: A task in one of these may have come to wait, or wait again.
_MAY_WAIT = (states.PENDING, states.RECEIVED, DELAYED)


def precedence(state: str) -> int:
    """Celery's rank of *state*, with DELAYED where PENDING is: a worker's word comes later."""
    ranked: int = states.precedence(states.PENDING if state == DELAYED else state)
    return ranked


class WaitingTask(Task):
    """A task that may be DELAYED.

    Besides its fields, nothing of Celery's is made before it is asked for, and nothing leads
    back to the task: a hundred thousand of them are a burden to Python's garbage collector, which
    runs on Flower's IO loop, and :mod:`.refreshing` keeps them from it.
    """

    state: str

    def __init__(
        self, uuid: str | None = None, cluster_state: Any = None, children: Any = (), **saved: Any
    ) -> None:
        # Celery, too, passes over the children that were saved.
        self.uuid, self.cluster_state = uuid, cluster_state
        if saved:
            self.__dict__.update(saved)

    @cached_property
    def children(self) -> WeakSet[Any]:
        """The tasks that this one has sent."""
        return WeakSet()

    @property
    def parent(self) -> Any:
        """The task that sent it; None where it is not known."""
        return self._other(self.parent_id)

    @property
    def root(self) -> Any:
        """The first of its tasks; None where it is not known."""
        return self._other(self.root_id)

    def as_dict(self) -> dict[str, Any]:
        """The task's fields as Celery's, with ids in place of tasks."""
        return {name: getattr(self, name) for name in self._fields} | {
            "root": self.root_id,
            "parent": self.parent_id,
            "children": [task.id for task in self.children],
        }

    def _other(self, task_id: str | None) -> Any:
        tasks = getattr(self.cluster_state, "tasks", {})
        return getattr(tasks, "data", tasks).get(task_id) if task_id else None

    def event(
        self,
        type_: str,
        timestamp: Any = None,
        local_received: Any = None,
        fields: Any = None,
        **kwargs: Any,
    ) -> None:
        """Learn from an event what has become of the task."""
        kwargs.setdefault("precedence", precedence)
        super().event(type_, timestamp, local_received, fields, **kwargs)
        if self.state == states.PENDING and _microseconds(self.eta) > time() * 1e6:
            self.state = DELAYED


class WaitingState(EventsState):
    """Flower's state of the cluster, with DELAYED tasks; for its IO loop only."""

    Task = WaitingTask

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Due times of all that are DELAYED, in microseconds since the epoch.
        self.delayed: dict[str, int] = {}
        for task in self._known().values():
            self._note(task)

    def event(self, event: dict[str, Any]) -> None:
        """Learn from an event, which tasks are DELAYED included."""
        super().event(event)
        if event["type"].startswith("task-"):
            task = self._known().get(event["uuid"])
            if task is not None:
                self._note(task)

    def saw(self, waiting: Iterable[Waiting]) -> int:
        """Note that these wait now; return how many of them are new, or have changed."""
        changes = 0
        for found in waiting:
            if not found.name:
                continue  # no task
            task = self._known().get(found.id)
            if task is None:
                self._add(found)
                changes += 1
            elif task.state in _MAY_WAIT:
                changes += self._update(task, found)
        return changes

    def does_not_wait(self, ids: Iterable[str]) -> None:
        """Note that these were handed over; those still DELAYED become PENDING."""
        for task_id in ids:
            task = self._known().get(task_id)
            if task is not None and task.state == DELAYED:
                self._become(task, states.PENDING)
            self.delayed.pop(task_id, None)

    def changed(self, outcome: Outcome, *, cancelled: bool) -> None:
        """Note that a task was cancelled or moved through us."""
        task = self._known().get(outcome.id)
        if not outcome or task is None or task.state not in _MAY_WAIT:
            return
        if cancelled:
            task.revoked = time()
            self._become(task, states.REVOKED)
        elif outcome.due_us is not None:
            task.eta = _iso(outcome.due_us)
            self._become(task, DELAYED if outcome.due_us / 1e6 > time() else states.PENDING)

    def due(self, ids: Iterable[str]) -> set[str]:
        """Ids of the DELAYED tasks among these whose time has come."""
        now_us = time() * 1e6
        return {task_id for task_id in ids if self.delayed.get(task_id, now_us + 1) <= now_us}

    # --- private -------------------------------------------------------------------------

    def _known(self) -> Any:
        """The tasks, without the bookkeeping of which was used last."""
        return getattr(self.tasks, "data", self.tasks)

    def _add(self, found: Waiting) -> None:
        evicted = self._eviction_candidate(found.id)
        task = self.tasks[found.id] = self.Task(found.id, cluster_state=self)
        task.timestamp = time()
        self._describe(task, found)
        task.state = DELAYED
        self._index_task(task, evicted)
        if evicted is not None and evicted not in self._known():
            self.delayed.pop(evicted, None)
        self.delayed[found.id] = found.due_us

    def _update(self, task: Any, found: Waiting) -> bool:
        if self.delayed.get(found.id) == found.due_us:
            return False
        if task.state == states.RECEIVED and found.due_us <= time() * 1e6:
            return False  # it was read a moment before it was received
        # What stock Flower had saved is stock, too.
        task.__class__ = self.Task
        self._describe(task, found)
        self._become(task, DELAYED)
        self.delayed[found.id] = found.due_us
        return True

    def _describe(self, task: Any, found: Waiting) -> None:
        task.name, task.args, task.kwargs = found.name, found.args, found.kwargs
        task.eta, task.retries, task.root_id = _iso(found.due_us), found.retries, found.root_id
        task.exchange, task.routing_key = found.exchange, found.routing_key

    def _become(self, task: Any, state: str) -> None:
        task.state = state
        self._index_task(task, None)
        self._note(task)

    def _note(self, task: Any) -> None:
        if task.state == DELAYED:
            self.delayed[task.uuid] = _microseconds(task.eta)
        else:
            self.delayed.pop(task.uuid, None)


def _iso(moment_us: int) -> str:
    moment = datetime.fromtimestamp(moment_us // 1000 / 1000, UTC)
    return moment.isoformat(timespec="milliseconds")


def _microseconds(eta: Any) -> int:
    try:
        return due_us(eta) if eta else 0
    except InvalidDueTime:
        return 0
