"""``bulk(app)`` with a store: each task is stored once, or reported.

tests/conformance has the tests for all brokers.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from time import time_ns
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue
from sqlalchemy import func, select

from celery_native_delay import UnsupportedBroker, install
from celery_native_delay.bulk import bulk
from celery_native_delay.records.sql import RECORDS
from celery_native_delay.transports.sql.delays import BROADCAST, StoreMessage
from celery_native_delay.transports.sql.outbox import NumberedBatches
from celery_native_delay.transports.sql.schema import MESSAGES, METADATA
from celery_native_delay.transports.sql.store import Store
from tests.conformance.brokers import Broker, options_of, running_broker, settings_of


def make_app(url: str, **settings: Any) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(
        task_queues=[Queue("plain"), Queue("no\0queue")],
        task_default_queue="plain",
        task_ignore_result=True,
        broker_transport_options=options_of(url),
    )
    return install(app, **settings)


def store_of(app: Celery) -> Store:
    with app.connection_for_write() as connection:
        store: Store = connection.default_channel.delays.store
        store.prepare()
        return store


def numbers(store: Store) -> list[int]:
    """The first argument of each task in *store*."""
    with store.engine.connect() as connection:
        envelopes = connection.execute(select(MESSAGES.c.envelope)).scalars().all()
    bodies = [b64decode(json.loads(envelope)["body"]) for envelope in envelopes]
    return sorted(json.loads(body)[0][0] for body in bodies)


def outboxes(store: Store) -> int:
    with store.engine.connect() as connection:
        asked = select(func.count()).where(RECORDS.c.kind == "outbox")
        return int(connection.execute(asked).scalar_one())


@pytest.fixture
def app(url: str) -> Iterator[Celery]:
    app = make_app(url, **settings_of(url))
    yield app
    app.close()


@pytest.fixture(scope="module")
def postgresql() -> Iterator[Broker]:
    with running_broker("filesystem-postgresql", pytest.fail) as broker:
        yield broker


@pytest.fixture
def shop(postgresql: Broker) -> Iterator[Celery]:
    """An app whose store is a PostgreSQL of this module."""
    url = postgresql.new_space()
    app = make_app(url, **settings_of(url))
    yield app
    app.close()


# ---- nothing lost, nothing twice -----------------------------------------------------------------


def test_a_batch_stored_twice_is_there_once(app: Celery) -> None:
    """Also if its messages were handed over meanwhile."""
    store = store_of(app)
    batches, due_us = NumberedBatches(store), time_ns() // 1000
    puts = [[StoreMessage("plain", due_us, f"task-{number}", f'"{number}"')] for number in range(3)]
    for _ in range(2):
        batches.store(1, puts[0])
    assert store.census().waiting == 1
    with store.taking(until_us=due_us) as taken:
        taken.delivered += [message.id for message in taken.messages]
    batches.store(1, puts[0])
    assert store.census().waiting == 0
    for _ in range(2):
        batches.store(2, puts[1])
    assert store.census().waiting == 1
    METADATA.drop_all(store.engine)
    batches.store(3, puts[2])
    assert store.census().waiting == 1
    batches.close()
    assert outboxes(store) == 0


@pytest.mark.ci
def test_a_restart_of_the_store_loses_and_duplicates_nothing(
    postgresql: Broker, shop: Celery
) -> None:
    with bulk(shop) as batch:
        for number in range(1_000):
            if number == 500:
                postgresql.restart()
            batch.send("shop.remind", (number,), countdown=600)
    assert batch.result.confirmed == 1_000
    assert numbers(store_of(shop)) == list(range(1_000))


# ---- refused and in doubt ------------------------------------------------------------------------


@pytest.mark.ci
def test_a_task_that_the_database_refuses_is_reported(shop: Celery) -> None:
    with bulk(shop, check=False) as batch:
        for number in range(50):
            queue = "no\0queue" if number == 20 else "plain"
            batch.send("shop.remind", (number,), countdown=600, queue=queue)
    assert batch.result.confirmed == 49
    assert [json.loads(each.body)[0][0] for each in batch.result.refused] == [20]
    assert numbers(store_of(shop)) == [*range(20), *range(21, 50)]


def test_a_task_without_a_queue_is_reported_as_returned(app: Celery) -> None:
    """kombu itself drops it silently."""
    with bulk(app, check=False) as batch:
        for number in range(3):
            batch.send("shop.remind", (number,), countdown=600)
            batch.send("shop.remind", (number,), countdown=600, exchange="nobodys", routing_key="x")
    assert batch.result.confirmed == 3
    assert [message.exchange for message in batch.result.returned] == ["nobodys"] * 3
    assert numbers(store_of(app)) == [0, 1, 2]


@pytest.mark.ci
def test_a_broadcast_is_stored_once(shop: Celery) -> None:
    news = Queue("headlines", Exchange("news", type="fanout"))
    to = {"exchange": "news", "routing_key": "any", "declare": [news]}
    with bulk(shop) as batch:
        for number in range(3):
            batch.send("shop.remind", (number,), countdown=600, **to)
    stored = select(MESSAGES.c.queue)
    assert (
        store_of(shop).look_up(lambda rows: rows.execute(stored).scalars().all()) == [BROADCAST] * 3
    )


def test_without_a_store_the_error_names_the_setting() -> None:
    app = make_app("filesystem://")
    with pytest.raises(UnsupportedBroker, match="set native_delay_store"), bulk(app):
        pass
