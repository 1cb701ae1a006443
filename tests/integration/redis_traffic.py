"""Delaying connections and promoters on Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kombu import Connection

from celery_native_delay.store.interface import Row
from celery_native_delay.transports.redis.delays import RedisDelays
from celery_native_delay.transports.redis.keys import Destination, entry_of
from celery_native_delay.transports.redis.promoter import RedisPromoter
from celery_native_delay.transports.redis.store import RedisBrokerStore
from tests.traffic import beside


def delaying(url: str, *, transport_options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A kombu connection whose messages with an ETA ahead wait in Redis."""
    return Connection(
        url, transport_options={"native_delay": settings or True} | (transport_options or {})
    )


def delays_of(connection: Any) -> RedisDelays:
    delays: RedisDelays = connection.default_channel.delays
    return delays


def store_of(connection: Any) -> RedisBrokerStore:
    return delays_of(connection).own


def row(name: str, due_us: int, destination: Destination, envelope: str) -> Row:
    return Row(name, name, due_us, entry_of(destination, envelope))


def entries(store: RedisBrokerStore) -> int:
    """The number of all stored messages: waiting, parked or lost."""
    return int(store.client.hlen(store.keys.messages))


@contextmanager
def promoting(connect: Callable[..., Any]) -> Iterator[RedisPromoter]:
    """Run a promoter in a thread, as a worker does."""
    promoter = RedisPromoter(connect)
    with beside(promoter.run, stop=promoter.stop):
        yield promoter


def connector(url: str, **options: Any) -> Callable[..., Any]:
    """A function with which a promoter opens its connections."""

    def connect(*, transport_options: dict[str, Any]) -> Any:
        return delaying(url, transport_options=options | transport_options)

    return connect
