"""Counts a worker's delayed messages, and sends an event with the counts every second.

The worker counts while events are on (``celery worker -E``, ``celery control enable_events``). The
metrics exporter listens to these events, so workers need no HTTP port.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping
from functools import partial
from math import inf
from threading import Lock
from typing import Any

from celery import signals

from ..message import Delayed
from .arrival import queue_of

#: The event's type. Celery's State, Flower and celery-exporter ignore its group.
EVENT = "delay-tally"

#: Upper bounds of the buckets in which lateness is counted, in seconds.
BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0, inf)

INTERVAL_SECONDS = 1.0


class Tallying:
    """Counts a worker's delayed messages, and the starts of rate-limited tasks."""

    def __init__(self, consumer: Any, rated: Container[str] = ()) -> None:
        self._consumer = consumer
        self._rated = rated
        self._tallies: dict[str, Counter[str]] = defaultdict(Counter)
        self._starts: Counter[str] = Counter()
        self._lock = Lock()  # pools of threads start tasks in their threads
        self._sends_events = False
        self._timer: Any = None
        self.passing: Any = None
        """The message that Celery handles now. The signal ``task_revoked`` has no message."""

    def start(self) -> None:
        """Send the counts of delayed messages every second, over a new connection."""
        signals.task_revoked.connect(self._on_revoked, weak=False)
        self.send()
        self._timer = self._consumer.timer.call_repeatedly(INTERVAL_SECONDS, self.send)

    def stop(self) -> None:
        """Send the last counts of delayed messages before the connection is closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.send()

    def shutdown(self) -> None:
        signals.task_revoked.disconnect(self._on_revoked)

    def send(self) -> None:
        dispatcher = self._consumer.event_dispatcher
        if dispatcher is None:
            return
        groups = dispatcher.groups
        self._sends_events = dispatcher.enabled and (not groups or "task" in groups)
        with self._lock:
            tallies, self._tallies = self._tallies, defaultdict(Counter)
            starts, self._starts = self._starts, Counter()
        if (tallies or starts) and self._sends_events:
            queues = {queue: dict(tally) for queue, tally in tallies.items()}
            fields = {"queues": queues, "rate_starts": dict(starts)}
            # send() would drop our group if `enable_events` named only Celery's groups.
            dispatcher.publish(EVENT, fields, dispatcher.producer)

    # --- counting ------------------------------------------------------------------------

    def expired(self, message: Any) -> None:
        self._count(message, "expired")

    def received(self, request: Any) -> None:
        """Count a received task, and later its start."""
        if not self._sends_events:
            return
        if request.name in self._rated:
            with self._lock:
                self._starts[request.name] += 1
        delayed: Delayed | None = getattr(request.message, "native_delay", None)
        if delayed is None or delayed.cancelled:
            return
        if getattr(request.message, "waited_in_line", False):
            return  # it waited for its rate, so its lateness says nothing
        queue = self._count(request.message, "matured")
        # No signal tells the main process that a task starts.
        request.on_accepted = partial(
            self._on_accepted, request, request.on_accepted, queue, delayed.due_us
        )

    def _on_accepted(
        self,
        request: Any,
        accepted: Callable[..., Any],
        queue: str,
        due_us: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        vars(request).pop("on_accepted", None)  # a reference cycle
        accepted(*args, **kwargs)
        with self._lock:
            count_start(self._tallies[queue], round(request.time_start * 1_000_000) - due_us)

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
        if self._sends_events:
            with self._lock:
                self._tallies[queue][what] += 1
        return queue


def count_start(tally: Counter[str], late_us: int) -> None:
    """Add a started task to the histogram of lateness (start time minus due time)."""
    late_us = max(late_us, 0)
    tally[bucket(BOUNDS[bisect_left(BOUNDS, late_us / 1_000_000)])] += 1
    tally["late_us"] += late_us


def bucket(bound: float) -> str:
    """Return the name of a histogram bucket from the bucket's upper bound in seconds."""
    return f"late_{bound}"


def counts_of(fields: Mapping[str, Any]) -> Counter[str]:
    """Return the message counts in an event.

    Raises ValueError, TypeError or AttributeError if *fields* is not a dict of counts.
    """
    for name, count in fields.items():
        if not isinstance(count, int) or not 0 <= count < 1 << 63:
            raise ValueError(f"expected {name} to be a count, got {count!r}")
    return Counter(fields)
