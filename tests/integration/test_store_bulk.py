"""``bulk(app)`` with a store: each task is stored once, or reported.

tests/conformance has the tests for all brokers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

from celery_native_delay import install
from celery_native_delay.bulk import bulk
from celery_native_delay.store.entry import StoreEntry
from celery_native_delay.store.interface import Store
from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis
from tests.brokers import on_one_version
from tests.conformance.brokers import Broker, options_of, running_broker, settings_of


def make_app(url: str, **settings: Any) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(
        task_queues=[Queue("plain"), Queue("other")],
        task_default_queue="plain",
        task_ignore_result=True,
        broker_transport_options=options_of(url),
    )
    return install(app, **settings)


def store_of(app: Celery) -> Store:
    with app.connection_for_write() as connection:
        store: Store = connection.default_channel.needed_store
        return store


def entries(store: Store) -> list[StoreEntry]:
    found: list[StoreEntry] = []
    row = None
    while rows := store.rows_after(row, limit=500):
        row = rows[-1]
        found += [StoreEntry.decoded(each.entry) for each in rows]
    return found


def numbers(store: Store) -> list[int]:
    """The ``order`` of each task in *store*."""
    return sorted(int(entry.task_id.removeprefix("order-")) for entry in entries(store))


@pytest.fixture
def app(url: str) -> Iterator[Celery]:
    with make_app(url, **settings_of(url)) as app:
        yield app


@pytest.fixture(scope="module")
def postgresql() -> Iterator[Broker]:
    with running_broker("filesystem-postgresql", pytest.fail) as broker:
        yield broker


@pytest.fixture
def shop(postgresql: Broker) -> Iterator[Celery]:
    """An app whose store is a PostgreSQL of this module."""
    url = postgresql.new_space()
    with make_app(url, **settings_of(url)) as app:
        yield app


def send(batch: Any, *numbers: int, **options: Any) -> None:
    for number in numbers:
        task_id = f"order-{number}"
        batch.send("shop.remind", (number,), countdown=600, task_id=task_id, **options)


@pytest.mark.ci
def test_a_restart_of_the_store_loses_and_duplicates_nothing(
    postgresql: Broker, shop: Celery
) -> None:
    with bulk(shop) as batch:
        send(batch, *range(500))
        postgresql.restart()
        send(batch, *range(500, 1000))
    assert batch.result.confirmed == 1_000
    assert numbers(store_of(shop)) == list(range(1_000))


def test_a_task_that_is_sent_twice_is_stored_once(app: Celery) -> None:
    with bulk(app) as batch:
        send(batch, *range(20), *range(20))
    assert numbers(store_of(app)) == list(range(20))


@on_one_version
def test_arguments_that_celery_converts_arrive_converted(
    vhost_url: str, store_redis: PrivateRedis
) -> None:
    """As with ``@app.task(pydantic=True)``, whose models only ``apply_async`` can encode."""
    with make_app(vhost_url, store=store_redis.url) as app:

        @app.task(name="shop.remind", shared=False)
        def remind(order: int) -> None:
            """Never run here."""

        remind._dump_pydantic_arguments = lambda args, kwargs: ([args[0].numerator], kwargs)
        with bulk(app) as batch:
            for number in range(4):
                batch.send("shop.remind", (Fraction(number),), countdown=600)
        found = [json.loads(entry.body)[0] for entry in entries(store_of(app))]
    assert (sorted(found), batch.result.by_template) == ([[0], [1], [2], [3]], 0)


@on_one_version
def test_only_named_tasks_are_stored(
    rabbitmq: PrivateRabbitMQ, vhost_url: str, store_redis: PrivateRedis
) -> None:
    with make_app(vhost_url, store=store_redis.url, store_tasks=["shop.remind"]) as app:
        with bulk(app) as batch:
            send(batch, 1, 2, 3)
            for number in range(3):
                batch.send("shop.retry", (number,), countdown=600)
        assert batch.result.confirmed == 6
        assert numbers(store_of(app)) == [1, 2, 3]
        with app.connection_for_write() as connection:
            part = connection.default_channel.admin_part(app._native_delay.settings())
            assert part.own.backlog().waiting == 3


def test_a_task_without_a_queue_is_reported_as_returned(app: Celery) -> None:
    """kombu itself drops it silently."""
    with bulk(app, check=False) as batch:
        for number in range(3):
            send(batch, number)
            batch.send("shop.remind", (number,), countdown=600, exchange="nobodys", routing_key="x")
    assert batch.result.confirmed == 3
    assert [message.exchange for message in batch.result.returned] == ["nobodys"] * 3
    assert numbers(store_of(app)) == [0, 1, 2]


@pytest.mark.ci
def test_a_broadcast_is_stored_once(shop: Celery) -> None:
    news = Queue("headlines", Exchange("news", type="fanout"))
    to = {"exchange": "news", "routing_key": "any", "declare": [news]}
    with bulk(shop) as batch:
        send(batch, 1, 2, 3, **to)
    assert [entry.queue for entry in entries(store_of(shop))] == [None] * 3
