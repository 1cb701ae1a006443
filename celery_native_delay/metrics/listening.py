"""Counts of delayed messages, as workers tell them by events of our group.

On RabbitMQ no other events are sent here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from threading import Event, Lock, Thread
from typing import Any

from celery import Celery
from celery.events.receiver import EventReceiver
from celery.utils.log import get_logger

from ..backoff import Backoff
from ..errors import described
from ..worker.tally import EVENT, Tally, count_of

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


class Listener(Thread):
    """Thread that counts what workers tell, until it is stopped; reconnects by itself.

    *hears* says whether it is connected.
    """

    def __init__(self, app: Celery, counts: Counts) -> None:
        super().__init__(name="native-delay-listener", daemon=True)
        self._app = app
        self._counts = counts
        self._receiver: Any = None
        self._stopping = Event()
        self._backoff = Backoff(1.0, 30.0)
        self._told = False
        self.hears = False

    def stop(self) -> None:
        self._stopping.set()
        if self._receiver is not None:
            self._receiver.should_stop = True

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except Exception as exc:  # the thread must outlive whatever the broker does
                self.hears = False
                if self._stopping.is_set():
                    return
                if not self._told:
                    self._told = True
                    logger.warning("native delay: hears no events of workers: %s", described(exc))
                self._stopping.wait(self._backoff.failed())

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0)
            self._receiver = _Receiver(
                connection,
                handlers={EVENT: self._counts.hear},
                routing_key="delay.#",
                app=self._app,
            )
            self._receiver.ready = self._is_ready
            self._receiver.should_stop = self._stopping.is_set()
            self._receiver.capture(limit=None, timeout=None, wakeup=False)

    def _is_ready(self) -> None:
        self.hears = True
        if self._told:
            self._told = False
            logger.info("native delay: hears events of workers again")
        self._backoff.reset()


class _Receiver(EventReceiver):  # type: ignore[misc]
    """Celery's receiver of events, telling when it consumes."""

    ready: Callable[[], None]

    def on_consume_ready(self, *args: Any, **kwargs: Any) -> None:
        super().on_consume_ready(*args, **kwargs)
        self.ready()
