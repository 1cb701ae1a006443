"""Plain kombu messages over any broker: publish with a delay, and collect arrivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from threading import Thread
from time import monotonic, time
from typing import Any

from celery import Celery
from kombu import Exchange, Producer, Queue

from tests.waiting import PATIENCE_SECONDS

TOPIC = Exchange("shop", type="topic")
DIRECT = Exchange("billing", type="direct")

QUEUES = [
    Queue("default"),
    Queue("orders", TOPIC, routing_key="orders.#"),
    Queue("urgent", TOPIC, routing_key="*.urgent"),
    Queue("invoices", DIRECT, routing_key="invoice"),
    Queue("copies", DIRECT, routing_key="invoice"),
]


#: The queue of the tasks that wait in tests.
JOBS = "jobs"


def eta_in(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def publish(
    connection: Any,
    body: Any,
    routing_key: str,
    *,
    delay: float | None = None,
    headers: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Publish on the connection's default channel, to arrive *delay* seconds from now if given."""
    headers = dict(headers or {})
    if delay is not None:
        headers["eta"] = eta_in(delay)
    Producer(connection).publish(body, routing_key=routing_key, headers=headers, **options)


def send_task(app: Celery, number: int, *, countdown: float, **options: Any) -> str:
    """Send the task ``order-<number>``; its id is returned."""
    options = {"queue": JOBS, "task_id": f"order-{number}"} | options
    kwargs = {"order": number, "text": "käse" if number % 2 else "wurst"}
    return str(app.send_task("shop.remind", ("ada",), kwargs, countdown=countdown, **options).id)


@dataclass(frozen=True)
class Arrival:
    """A received message; *at* is the Unix time of its receipt."""

    message: Any
    at: float

    @property
    def body(self) -> Any:
        return self.message.decode()

    @property
    def waited(self) -> bool:
        """True if the message waited in the broker."""
        return getattr(self.message, "native_delay", None) is not None

    @property
    def lateness_seconds(self) -> float:
        """Seconds from the ETA to the receipt; negative if the message came early."""
        return self.at - datetime.fromisoformat(self.message.headers["eta"]).timestamp()


@dataclass
class Inbox:
    """Collects and acknowledges received messages."""

    connection: Any
    arrivals: list[Any] = field(default_factory=list)

    def receive(self, body: Any, message: Any) -> None:
        """Take one message; the consumer's callback."""
        self.arrivals.append(Arrival(message, time()))
        message.ack()

    def receive_until(
        self, condition: Callable[[], object], *, timeout_seconds: float = PATIENCE_SECONDS
    ) -> bool:
        """Receive until *condition* is true; False if no message comes for *timeout_seconds*."""
        deadline, count = monotonic() + timeout_seconds, len(self.arrivals)
        silence_seconds = 0.01
        while True:
            with suppress(TimeoutError):
                while True:
                    self.connection.drain_events(timeout=silence_seconds)
            if condition():
                return True
            if len(self.arrivals) != count:
                deadline, count = monotonic() + timeout_seconds, len(self.arrivals)
            if monotonic() > deadline:
                return False
            silence_seconds = min(1.5 * silence_seconds, 0.05)  # a look may cost the broker much

    def wait_for(self, count: int, *, timeout_seconds: float = PATIENCE_SECONDS) -> list[Any]:
        """Wait for *count* arrivals; fails if more came."""
        self.receive_until(lambda: len(self.arrivals) >= count, timeout_seconds=timeout_seconds)
        assert len(self.arrivals) == count, [arrival.body for arrival in self.arrivals]
        return list(self.arrivals)


@contextmanager
def inbox(connection: Any, *queues: str | Queue) -> Iterator[Inbox]:
    """An inbox that consumes on *connection*."""
    receiver = Inbox(connection)
    declared = [queue if isinstance(queue, Queue) else Queue(queue) for queue in queues]
    with connection.Consumer(declared, callbacks=[receiver.receive]):
        yield receiver


@contextmanager
def beside(run: Callable[[], None], *, stop: Callable[[], None]) -> Iterator[None]:
    """Run *run* in a thread; *stop* ends it at the end of the block."""
    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
