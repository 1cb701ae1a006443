"""Flower's picture of the cluster, in which a task that waits in the broker is DELAYED.

Monitors learn of a task when it is sent, if its app says so at all, and forget it on their restart.
Here the ledger tells; events say what happens to the task afterwards, as ever. No event of our own
is sent: Celery would rank its state above REVOKED, and take whoever sends it for a worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from time import time
from typing import Any

from celery import states
from celery.events.state import Task
from flower.events import EventsState

from ..core.due_time import due_us
from ..core.errors import InvalidDueTime
from ..core.ledger import Outcome, Waiting

DELAYED = "DELAYED"

#: A task in one of these may have come to wait, or wait again.
_MAY_WAIT = (states.PENDING, states.RECEIVED, DELAYED)


def precedence(state: str) -> int:
    """As Celery's, with DELAYED where PENDING is: whatever a worker says comes later."""
    ranked: int = states.precedence(states.PENDING if state == DELAYED else state)
    return ranked


class WaitingTask(Task):
    """A task that may be DELAYED."""

    state: str

    def event(
        self,
        type_: str,
        timestamp: Any = None,
        local_received: Any = None,
        fields: Any = None,
        **kwargs: Any,
    ) -> None:
        """Learn from an event what has become of it."""
        kwargs.setdefault("precedence", precedence)
        super().event(type_, timestamp, local_received, fields, **kwargs)
        if self.state == states.PENDING and _seconds_until(self.eta) > 0:
            self.state = DELAYED


class WaitingState(EventsState):
    """Used on Flower's IO loop only, as the original."""

    Task = WaitingTask

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Ids of all that are DELAYED.
        self.delayed = {task.uuid for task in self._known().values() if task.state == DELAYED}

    def event(self, event: dict[str, Any]) -> None:
        """Learn from an event."""
        super().event(event)
        if event["type"].startswith("task-"):
            self._note(self._known()[event["uuid"]])

    def saw(self, waiting: Iterable[Waiting]) -> None:
        """These wait now."""
        for found in waiting:
            if not found.name:
                continue  # no task
            task = self._known().get(found.id)
            if task is None:
                self._add(found)
            elif task.state in _MAY_WAIT:
                self._update(task, found)

    def does_not_wait(self, ids: Collection[str]) -> None:
        """These were handed over; if nothing was heard of them since, nobody has received them."""
        for task_id in ids:
            task = self._known().get(task_id)
            if task is not None and task.state == DELAYED:
                self._become(task, states.PENDING)
        self.delayed.difference_update(ids)

    def changed(self, outcome: Outcome, *, cancelled: bool) -> None:
        """Somebody has cancelled or moved what waited."""
        task = self._known().get(outcome.id)
        if not outcome or task is None or task.state not in _MAY_WAIT:
            return
        if cancelled:
            task.revoked = time()
            self._become(task, states.REVOKED)
        elif outcome.due_us is not None:
            task.eta = _iso(outcome.due_us)
            self._become(task, DELAYED if outcome.due_us / 1e6 > time() else states.PENDING)

    def overdue_without_ledger(self) -> list[str]:
        """The DELAYED ones whose time has come, as far as events have told it."""
        known = self._known()
        return [
            task_id
            for task_id in self.delayed
            if task_id not in known or _seconds_until(known[task_id].eta) <= 0
        ]

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
            self.delayed.discard(evicted)
        self.delayed.add(found.id)

    def _update(self, task: Any, found: Waiting) -> None:
        eta, waits = _iso(found.due_us), found.due_us / 1e6 > time()
        if task.state == states.RECEIVED and not waits:
            return  # it was read a moment before it was received
        if task.state == DELAYED and task.eta == eta and task.uuid in self.delayed:
            return
        # What stock Flower had saved is stock, too.
        task.__class__ = self.Task
        self._describe(task, found)
        self._become(task, DELAYED)

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
            self.delayed.add(task.uuid)
        else:
            self.delayed.discard(task.uuid)


def _iso(moment_us: int) -> str:
    return datetime.fromtimestamp(moment_us / 1e6, UTC).isoformat(timespec="milliseconds")


def _seconds_until(eta: Any) -> float:
    try:
        return due_us(eta) / 1e6 - time() if eta else 0.0
    except InvalidDueTime:
        return 0.0
