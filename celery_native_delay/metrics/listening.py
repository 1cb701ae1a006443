"""Receiver of the events of our group; on RabbitMQ no others are sent here."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

from celery import Celery
from celery.events.receiver import EventReceiver
from celery.utils.log import get_logger

from ..backoff import Backoff
from ..worker.tally import EVENT
from .counting import Counts

logger = get_logger(__name__)


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
                    logger.warning(
                        "native delay: hears no events of workers: %s: %s", type(exc).__name__, exc
                    )
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
