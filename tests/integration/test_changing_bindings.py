"""A message goes where the exchanges, queues and bindings lead when it is due."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from amqp.exceptions import ConsumerCancelled, NotFound
from kombu import Queue

from celery_native_delay.transports.rabbitmq import routes
from celery_native_delay.transports.rabbitmq.parking import rescue
from tests.brokers import on_one_version
from tests.integration.traffic import (
    Inbox,
    bind,
    declare_exchange,
    declare_queue,
    delaying,
    delays_of,
    parked_count,
)
from tests.traffic import PATIENCE_SECONDS, publish
from tests.waiting import wait_until


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
    """Declare and bind a queue as a consuming worker does."""
    declare_exchange(worker, exchange, kind)
    declare_queue(worker, queue, **arguments)
    bind(worker, queue, exchange, "a")
    delays_of(worker).prepare(consuming=True)


def test_a_queue_that_is_bound_while_a_message_waits_gets_it(worker: Any, producer: Any) -> None:
    """A queue that is unbound meanwhile does not get it."""
    serve(worker, "old", "shop", "topic")
    publish(producer, "waits", "a", exchange="shop", delay=4)
    declare_queue(worker, "new")
    bind(worker, "new", "shop", "#")
    worker.default_channel.queue_unbind("old", "shop", "a")
    with inbox_of(worker, "old", "new") as letters:
        (came,) = letters.wait_for(1)
    assert (came.queue, came.body) == ("new", "waits")


@on_one_version
def test_a_message_goes_through_an_exchange_redeclared_with_another_type(
    worker: Any, producer: Any
) -> None:
    """A queue bound to the old exchange does not get it."""
    serve(worker, "old", "shop", "direct")
    publish(producer, "waits", "a", exchange="shop", delay=2)
    worker.default_channel.exchange_delete("shop")
    serve(worker, "new", "shop", "fanout")
    wait_until(lambda: parked_count(worker) == 1, timeout_seconds=PATIENCE_SECONDS)
    rescue(delays_of(worker))
    with inbox_of(worker, "old", "new") as letters:
        (came,) = letters.wait_for(1)
    assert (came.queue, came.body) == ("new", "waits")


@on_one_version
def test_a_producer_notices_that_an_exchange_has_another_type(
    worker: Any, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within ROUTE_SECONDS; messages sent later are not parked."""
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


@on_one_version
def test_a_producer_notices_that_an_exchange_is_deleted(
    worker: Any, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delayed publish raises NotFound, as an undelayed one does."""
    serve(worker, "old", "shop", "direct")
    monkeypatch.setattr(routes, "ROUTE_SECONDS", 0.0)
    publish(producer, "before", "a", exchange="shop", delay=0.2)
    worker.default_channel.exchange_delete("shop")
    with pytest.raises(NotFound):
        publish(producer, "after", "a", exchange="shop", delay=0.2)


@on_one_version
def test_deleting_a_queue_that_is_consumed_succeeds_and_its_consumer_learns_of_it(
    worker: Any,
) -> None:
    """The news is not raised out of the deletion."""
    serve(worker, "jobs", "shop", "direct")
    consumer = worker.Consumer(Queue("jobs", no_declare=True), callbacks=[print])
    consumer.consume()
    worker.default_channel.queue_delete("jobs")
    with pytest.raises(ConsumerCancelled):
        wait_until(lambda: worker.drain_events(timeout=1))


@contextmanager
def inbox_of(connection: Any, *queues: str) -> Iterator[Inbox]:
    letters = Inbox(connection).consume(queues)
    yield letters
    letters.close()
