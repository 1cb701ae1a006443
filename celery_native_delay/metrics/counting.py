"""Counts of delayed messages, as workers tell them, added up by queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from threading import Lock
from typing import Any

from celery.utils.log import get_logger

from ..worker.tally import Tally, count_of

logger = get_logger(__name__)


class Counts:
    """Sums by queue, and of *rated* tasks by name; 0 for those that are expected."""

    def __init__(self, queues: Iterable[str] = (), rated: Iterable[str] = ()) -> None:
        self._lock = Lock()
        self._by_queue = {queue: Tally() for queue in queues}
        self._starts = Counter(dict.fromkeys(rated, 0))
        self._told = False

    def hear(self, event: Mapping[str, Any]) -> None:
        """Count what a ``delay-tally`` event says; one that cannot be read is logged, once."""
        try:
            tallies = {
                str(queue): Tally.of_fields(fields) for queue, fields in event["queues"].items()
            }
            starts = {
                str(task): count_of(number) for task, number in event.get("rate_starts", {}).items()
            }
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as exc:
            if not self._told:
                self._told = True
                logger.warning(
                    "native delay: expected an event of a worker of ours, got one from %s that "
                    "cannot be counted: %r",
                    event.get("hostname"),
                    exc,
                )
            return
        with self._lock:
            for queue, tally in tallies.items():
                self._by_queue.setdefault(queue, Tally()).add(tally)
            self._starts.update(starts)

    def so_far(self) -> dict[str, Tally]:
        with self._lock:
            return deepcopy(self._by_queue)

    def starts(self) -> dict[str, int]:
        """Rated tasks that were started, by name."""
        with self._lock:
            return dict(self._starts)
