"""Delaying connections, queues and inboxes on RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic, time
from typing import Any, Self

import pytest
from kombu import Connection

from celery_native_delay import DelaySettings
from celery_native_delay.testing import PrivateRabbitMQ, vhost_name
from celery_native_delay.transports.rabbitmq.delays import RabbitDelays
from celery_native_delay.transports.rabbitmq.topology import Topology
from tests import traffic
from tests.brokers import ON_RABBITMQS
from tests.waiting import wait_until

on_all_versions = pytest.mark.parametrize("rabbitmq_version", ON_RABBITMQS, indirect=True)
"""Run a test on each RabbitMQ version: for code that may behave differently on them."""

SETTINGS = {"namespace": "tests", "levels": 8, "fused_bits": 0, "resolution": 0.02}
"""Few and short levels: quick to declare, and a delay is over in an instant."""

TOPOLOGY = Topology(DelaySettings.from_mapping(SETTINGS))


def delaying(url: str, *, transport_options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A kombu connection whose messages with an ETA ahead wait in the broker."""
    option = {"native_delay": SETTINGS | settings}
    return Connection(url, transport_options=option | (transport_options or {}))


def delays_of(connection: Any) -> RabbitDelays:
    delays: RabbitDelays = connection.default_channel.delays
    return delays


def declare_queue(connection: Any, name: str, **arguments: Any) -> str:
    """A durable queue through the connection's default channel."""
    connection.default_channel.queue_declare(
        name, durable=True, auto_delete=False, arguments=arguments
    )
    return name


def declare_exchange(connection: Any, name: str, kind: str, **arguments: Any) -> str:
    """A durable exchange through the connection's default channel."""
    connection.default_channel.exchange_declare(
        name, kind, durable=True, auto_delete=False, arguments=arguments
    )
    return name


def bind(
    connection: Any, queue: str, exchange: str, routing_key: str = "", **arguments: Any
) -> None:
    connection.default_channel.queue_bind(queue, exchange, routing_key, arguments=arguments)


@dataclass(frozen=True)
class Arrival(traffic.Arrival):
    """A message that came out of *queue*."""

    queue: str


class Inbox(traffic.Inbox):
    """Consumes queues on a channel of its own; what arrives need not be acknowledged."""

    arrivals: list[Arrival]

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._channel = connection.channel()

    def consume(self, queues: Iterable[str]) -> Self:
        for queue in queues:
            self._channel.basic_consume(
                queue, no_ack=True, callback=partial(self._on, queue), consumer_tag=queue
            )
        return self

    def close(self) -> None:
        self._channel.close()

    def _on(self, queue: str, raw: Any) -> None:
        message = self._channel.message_to_python(raw)
        self.arrivals.append(Arrival(message, time(), queue))

    def take(self) -> list[Arrival]:
        taken, self.arrivals = self.arrivals, []
        return taken


@contextmanager
def inbox(url: str, *queues: str, **settings: Any) -> Iterator[Inbox]:
    """An inbox on a connection of its own."""
    with delaying(url, **settings) as connection:
        yield Inbox(connection).consume(queues)


def bodies(arrivals: Iterable[Arrival]) -> list[Any]:
    return [arrival.body for arrival in arrivals]


def delete_levels(rabbitmq: PrivateRabbitMQ, url: str) -> None:
    """Delete everything of ours in the virtual host, as an administrator might."""
    vhost = vhost_name(url)
    with Connection(url) as admin:
        for kind, delete in (
            ("queues", admin.default_channel.queue_delete),
            ("exchanges", admin.default_channel.exchange_delete),
        ):
            for found in rabbitmq.api("GET", f"/{kind}/{vhost}"):
                if found["name"].startswith(f"{TOPOLOGY.space}."):
                    delete(found["name"])


# ---- the broker's queues ---------------------------------------------------------------------


def depth(connection: Any, queue: str) -> int:
    """The number of ready messages in *queue*, by AMQP, which is exact."""
    with connection.channel() as channel:
        return int(channel.queue_declare(queue, passive=True).message_count)


def parked_count(connection: Any, topology: Topology = TOPOLOGY) -> int:
    return depth(connection, topology.parking_queue)


_COUNTS = ("messages", "messages_ready", "messages_unacknowledged", "messages_dlx")


def held(rabbitmq: PrivateRabbitMQ, vhost: str, space: str = TOPOLOGY.space) -> dict[str, Any]:
    """Our queues that hold messages in any state, or have not reported yet."""
    queues = [queue for queue in rabbitmq.queues(vhost) if queue["name"].startswith(f"{space}.")]
    assert queues
    counts = {
        queue["name"]: {name: queue[name] for name in _COUNTS if name in queue}
        if "messages" in queue
        else None
        for queue in queues
    }
    return {name: count for name, count in counts.items() if count is None or any(count.values())}


def assert_nothing_held(rabbitmq: PrivateRabbitMQ, vhost: str, **space: str) -> None:
    """Check that all delay levels and the parking queue are empty.

    The management API's figures are up to 1.5 s old, so they must stay so for a while.
    """
    empty_since: list[float] = []

    def nothing_held() -> bool:
        if held(rabbitmq, vhost, **space):
            empty_since.clear()
            return False
        empty_since.append(monotonic())
        return empty_since[-1] - empty_since[0] > 2.5

    wait_until(nothing_held)
