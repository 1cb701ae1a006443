"""A message goes where the exchanges, queues and bindings lead when it is due."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from amqp.exceptions import NotFound

from celery_native_delay.transports.rabbitmq import routes
from celery_native_delay.transports.rabbitmq.parking import rescue
from tests.integration.traffic import (
    TOPOLOGY,
    Inbox,
    bind,
    declare_exchange,
    declare_queue,
    delaying,
    delays_of,
    depth,
    parked_count,
)
from tests.traffic import PATIENCE_SECONDS, publish
from tests.waiting import wait_until

REJECTS = {"x-overflow": "reject-publish"}


@pytest.fixture
def worker(vhost_url: str) -> Iterator[Any]:
    with delaying(vhost_url) as connection:
        delays_of(connection).prepare()
        yield connection


@pytest.fixture
def producer(vhost_url: str) -> Iterator[Any]:
    with delaying(vhost_url) as connection:
        delays_of(connection).prepare()
        yield connection


def serve(worker: Any, queue: str, exchange: str, kind: str, **arguments: Any) -> None:
    """Declare and bind as a worker does that consumes."""
    declare_exchange(worker, exchange, kind)
    declare_queue(worker, queue, **arguments)
    bind(worker, queue, exchange, "a")
    delays_of(worker).prepare(consuming=True)


def test_a_queue_that_is_bound_while_a_message_waits_gets_it(worker: Any, producer: Any) -> None:
    """And the queue that is unbound meanwhile does not."""
    serve(worker, "old", "shop", "topic")
    publish(producer, "waits", "a", exchange="shop", delay=4)
    declare_queue(worker, "new")
    bind(worker, "new", "shop", "#")
    worker.default_channel.queue_unbind("old", "shop", "a")
    with inbox_of(worker, "old", "new") as letters:
        (came,) = letters.wait_for(1)
    assert (came.queue, came.body) == ("new", "waits")


def test_an_exchange_of_another_type_gets_what_waited_for_it(worker: Any, producer: Any) -> None:
    """The queue that was bound to the old one gets it no more."""
    serve(worker, "old", "shop", "direct")
    publish(producer, "waits", "a", exchange="shop", delay=2)
    worker.default_channel.exchange_delete("shop")
    serve(worker, "new", "shop", "fanout")
    wait_until(lambda: parked_count(worker) == 1, timeout_seconds=PATIENCE_SECONDS)
    rescue(delays_of(worker))
    with inbox_of(worker, "old", "new") as letters:
        (came,) = letters.wait_for(1)
    assert (came.queue, came.body) == ("new", "waits")


def test_a_producer_learns_that_an_exchange_is_of_another_type(
    worker: Any, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within ROUTE_SECONDS: what it sends from then on needs no rescue."""
    serve(worker, "old", "shop", "direct")
    declare_exchange(producer, "shop", "direct")
    bind(producer, "old", "shop", "a")
    monkeypatch.setattr(routes, "ROUTE_SECONDS", 0.0)
    publish(producer, "before", "a", exchange="shop", delay=0.2)
    with inbox_of(worker, "old") as letters:
        letters.wait_for(1)
    worker.default_channel.exchange_delete("shop")
    serve(worker, "new", "shop", "fanout")
    publish(producer, "after", "a", exchange="shop", delay=0.2)
    with inbox_of(worker, "old", "new") as letters:
        (came,) = letters.wait_for(1)
    assert (came.queue, came.body) == ("new", "after")


def test_a_producer_learns_that_an_exchange_is_gone(
    worker: Any, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a message without a delay tells it."""
    serve(worker, "old", "shop", "direct")
    monkeypatch.setattr(routes, "ROUTE_SECONDS", 0.0)
    publish(producer, "before", "a", exchange="shop", delay=0.2)
    worker.default_channel.exchange_delete("shop")
    with pytest.raises(NotFound):
        publish(producer, "after", "a", exchange="shop", delay=0.2)


def test_whoever_deletes_a_queue_takes_its_landing_queue_along(worker: Any, producer: Any) -> None:
    """What waits for it then parks like any other, instead of in copies for that queue alone."""
    serve(worker, "full", "shop", "direct", **REJECTS)
    assert depth(worker, TOPOLOGY.queue_landing_queue("full")) == 0
    producer.default_channel.queue_delete("full")
    with pytest.raises(NotFound):
        depth(worker, TOPOLOGY.queue_landing_queue("full"))


@contextmanager
def inbox_of(connection: Any, *queues: str) -> Iterator[Inbox]:
    letters = Inbox(connection).consume(queues)
    yield letters
    letters.close()
