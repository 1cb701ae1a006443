"""A thread that adds up the counts of delayed messages in workers' ``delay-tally`` events.

On RabbitMQ, the binding key ``delay.#`` excludes all other events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from threading import Event, Lock, Thread
from typing import Any

from celery import Celery
from celery.events.receiver import EventReceiver
from celery.utils.log import get_logger

from ..backoff import Backoff
from ..errors import described
from ..worker.tally import EVENT, counts_of

logger = get_logger(__name__)


class Counts:
    """Sums of workers' counts: received messages by queue, started rate-limited tasks by name."""

    def __init__(self, queues: Iterable[str] = (), rated: Iterable[str] = ()) -> None:
        self._lock = Lock()
        self._by_queue: dict[str, Counter[str]] = {queue: Counter() for queue in queues}
        self._starts = Counter(dict.fromkeys(rated, 0))
        self._warned = False

    def hear(self, event: Mapping[str, Any]) -> None:
        """Add a worker's counts from a ``delay-tally`` event; log only the first invalid event."""
        try:
            tallies = {queue: counts_of(fields) for queue, fields in event["queues"].items()}
            starts = counts_of(event.get("rate_starts", {}))
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "native delay: ignores an invalid delay-tally event of %s: %r",
                    event.get("hostname"),
                    exc,
                )
            return
        with self._lock:
            for queue, tally in tallies.items():
                self._by_queue.setdefault(queue, Counter()).update(tally)
            self._starts.update(starts)

    def so_far(self) -> dict[str, Counter[str]]:
        with self._lock:
            return deepcopy(self._by_queue)

    def starts(self) -> dict[str, int]:
        """Return the number of started rate-limited tasks, by task name."""
        with self._lock:
            return dict(self._starts)


class Listener(Thread):
    """Thread that receives the workers' counts of delayed messages (``delay-tally`` events)."""

    def __init__(self, app: Celery, counts: Counts) -> None:
        super().__init__(name="native-delay-listener", daemon=True)
        self._app = app
        self._counts = counts
        self._receiver: Any = None
        self._stopping = Event()
        self._backoff = Backoff(1.0, 30.0)
        self._warned = False
        self.is_connected = False

    def stop(self) -> None:
        self._stopping.set()
        if self._receiver is not None:
            self._receiver.should_stop = True

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except Exception as exc:  # no error of the broker may end the thread
                self.is_connected = False
                if self._stopping.is_set():
                    return
                if not self._warned:
                    self._warned = True
                    logger.warning(
                        "native delay: cannot receive the workers' events: %s", described(exc)
                    )
                self._stopping.wait(self._backoff.failed())

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0)
            self._receiver = EventReceiver(
                connection,
                handlers={EVENT: self._counts.hear},
                routing_key="delay.#",
                app=self._app,
            )
            # Celery's own method would only wake up the workers, which wakeup=False turns off.
            self._receiver.on_consume_ready = self._is_ready
            self._receiver.should_stop = self._stopping.is_set()
            self._receiver.capture(limit=None, timeout=None, wakeup=False)

    def _is_ready(self, *_: Any, **__: Any) -> None:
        self.is_connected = True
        if self._warned:
            self._warned = False
            logger.info("native delay: receives the workers' events again")
        self._backoff.reset()
