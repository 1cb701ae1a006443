"""A worker's counts of the delayed messages it received, told by an event once a second.

Only with events on (``celery worker -E``, ``celery control enable_events``): an exporter of
metrics listens, and no worker needs a port. However many tasks run, it is one event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from functools import partial
from threading import Lock
from typing import Any

from celery import signals

from ..message import Delayed
from .arrival import queue_of
from .tally import EVENT, Tally

INTERVAL_SECONDS = 1.0


class Tallying:
    """Counters for one consumer, at work as long as events are on; *rated* are names of tasks."""

    def __init__(self, consumer: Any, rated: Container[str] = ()) -> None:
        self._consumer = consumer
        self._rated = rated
        self._tallies: dict[str, Tally] = {}
        self._starts: Counter[str] = Counter()
        self._lock = Lock()  # pools of threads start tasks in their threads
        self._is_heard = False
        self._timer: Any = None
        self.passing: Any = None
        """The message that Celery is being given: its signals do not say whose task it revokes."""
        self._receivers = (
            (signals.task_received, self._on_received),
            (signals.task_revoked, self._on_revoked),
        )

    def start(self) -> None:
        """Tell regularly, over a new connection."""
        self.tell()
        self._timer = self._consumer.timer.call_repeatedly(INTERVAL_SECONDS, self.tell)

    def stop(self) -> None:
        """Tell for the last time over a connection that goes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.tell()

    def shutdown(self) -> None:
        self._be_heard(False)

    def tell(self) -> None:
        """Send what was counted since the last time."""
        dispatcher = self._consumer.event_dispatcher
        if dispatcher is None:
            return
        groups = dispatcher.groups
        self._be_heard(dispatcher.enabled and (not groups or "task" in groups))
        with self._lock:
            tallies, self._tallies = self._tallies, {}
            starts, self._starts = self._starts, Counter()
        if (tallies or starts) and self._is_heard:
            queues = {queue: tally.as_fields() for queue, tally in tallies.items()}
            fields = {"queues": queues, "rate_starts": dict(starts)}
            # Not send(): it leaves out our group where `enable_events` has named Celery's.
            dispatcher.publish(EVENT, fields, dispatcher.producer)

    def _be_heard(self, heard: bool) -> None:
        if heard != self._is_heard:
            self._is_heard = heard
            for signal, receiver in self._receivers:
                if heard:
                    signal.connect(receiver, weak=False)
                else:
                    signal.disconnect(receiver)

    # --- counting ------------------------------------------------------------------------

    def expired(self, message: Any) -> None:
        self._count(message, "expired")

    def _on_received(self, sender: Any = None, request: Any = None, **_: Any) -> None:
        if sender is not self._consumer:
            return
        if request.name in self._rated:
            with self._lock:
                self._starts[request.name] += 1
        delayed: Delayed | None = getattr(request.message, "native_delay", None)
        if delayed is None or delayed.cancelled:
            return
        if getattr(request.message, "waited_in_line", False):
            return  # it came back before its turn, and was not late
        queue = self._count(request.message, "matured")
        # No signal says in this process that a task starts.
        request.on_accepted = partial(
            self._on_accepted, request, request.on_accepted, queue, delayed.due_us / 1_000_000
        )

    def _on_accepted(
        self,
        request: Any,
        accepted: Callable[..., Any],
        queue: str,
        due: float,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        vars(request).pop("on_accepted", None)  # it leads back to the request
        accepted(*args, **kwargs)
        with self._lock:
            self._tally(queue).start(request.time_start - due)

    def _on_revoked(
        self, sender: Any = None, request: Any = None, expired: bool = False, **_: Any
    ) -> None:
        message = self.passing
        if message is None or request is None or message.headers.get("id") != request.id:
            return
        if message.native_delay.cancelled:
            self._count(message, "cancelled")
        elif expired:
            self._count(message, "expired")

    def _count(self, message: Any, what: str) -> str:
        queue = queue_of(self._consumer, message)
        if self._is_heard:
            with self._lock:
                tally = self._tally(queue)
                setattr(tally, what, getattr(tally, what) + 1)
        return queue

    def _tally(self, queue: str) -> Tally:
        tally = self._tallies.get(queue)
        if tally is None:
            tally = self._tallies[queue] = Tally()
        return tally
