"""Plain kombu traffic over Redis for the integration tests: connections, promoters, an inbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from threading import Thread
from time import monotonic, time
from typing import Any

from kombu import Connection, Queue

from celery_native_delay.transports.redis.delays import Delays
from celery_native_delay.transports.redis.promoter import Promoter
from celery_native_delay.transports.redis.server import Server
from celery_native_delay.transports.redis.store import Moved, Store

#: Nothing takes this long, even while other tests use the machine.
PATIENCE_SECONDS = 60.0


def delaying(url: str, *, transport_options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A kombu connection whose messages with an ETA ahead wait in Redis."""
    return Connection(
        url, transport_options={"native_delay": settings or True} | (transport_options or {})
    )


def delays_of(connection: Any) -> Delays:
    delays: Delays = connection.default_channel.delays
    return delays


def store_of(connection: Any) -> Store:
    return delays_of(connection).store


def promote(store: Store) -> Moved:
    """Hand over what is due now, as the server's version wants it."""
    return store.promote(version=Server.from_info(store.client.info()).version)


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
    """Publish, *delay* seconds from now if given."""
    headers = dict(headers or {})
    if delay is not None:
        headers["eta"] = eta_in(delay)
    connection.Producer().publish(body, routing_key=routing_key, headers=headers, **options)


@dataclass(frozen=True)
class Arrival:
    """A message that came out of its queue at *at*, seconds since the epoch."""

    body: Any
    message: Any
    at: float

    @property
    def lateness_seconds(self) -> float:
        """From the ETA until now; negative if it came early."""
        return self.at - datetime.fromisoformat(self.message.headers["eta"]).timestamp()


@dataclass
class Inbox:
    """Consumes queues and keeps what arrives; acknowledges at once."""

    connection: Any
    arrivals: list[Arrival] = field(default_factory=list)

    def receive(self, body: Any, message: Any) -> None:
        self.arrivals.append(Arrival(body, message, time()))
        message.ack()

    def receive_until(
        self, condition: Callable[[], object], *, timeout_seconds: float = PATIENCE_SECONDS
    ) -> bool:
        """Receive until *condition* holds; False if it does not within *timeout_seconds*."""
        deadline = monotonic() + timeout_seconds
        while not condition():
            if monotonic() > deadline:
                return False
            with suppress(TimeoutError):
                self.connection.drain_events(timeout=0.05)
        return True

    def wait_for(self, count: int, *, timeout_seconds: float = PATIENCE_SECONDS) -> list[Arrival]:
        """The first *count* arrivals; fails when one more comes with them."""
        self.receive_until(lambda: len(self.arrivals) >= count, timeout_seconds=timeout_seconds)
        assert len(self.arrivals) == count, [arrival.body for arrival in self.arrivals]
        return list(self.arrivals)


@contextmanager
def inbox(connection: Any, *queues: str | Queue) -> Iterator[Inbox]:
    """An inbox on *connection*."""
    receiver = Inbox(connection)
    declared = [queue if isinstance(queue, Queue) else Queue(queue) for queue in queues]
    with connection.Consumer(declared, callbacks=[receiver.receive]):
        yield receiver


@contextmanager
def promoting(connect: Callable[..., Any]) -> Iterator[Promoter]:
    """A promoter in a thread of its own, as a worker has it."""
    promoter = Promoter(connect)
    thread = Thread(target=promoter.run, daemon=True)
    thread.start()
    try:
        yield promoter
    finally:
        promoter.stop()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def connector(url: str, **options: Any) -> Callable[..., Any]:
    """What a promoter makes its connections with."""

    def connect(*, transport_options: dict[str, Any]) -> Any:
        return delaying(url, transport_options=options | transport_options)

    return connect
