"""Waiting tasks in a store: a row's lock decides between a change and the dispatcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from celery import Celery

from celery_native_delay import Delay, RecordsUnavailable, Verdict, install
from celery_native_delay.transports.sql.store import Store
from tests.conformance.brokers import Broker, options_of, settings_of
from tests.integration.waiting_promises import *  # noqa: F403
from tests.traffic import beside
from tests.waiting import PATIENCE_SECONDS


def new_app(url: str, results: Path) -> Celery:
    app = Celery("shop", broker=url, backend=f"file://{results}", set_as_current=False)
    app.conf.broker_transport_options = options_of(url)
    return app


@pytest.fixture
def app(url: str, tmp_path: Path) -> Iterator[Celery]:
    app = install(new_app(url, tmp_path), **settings_of(url))
    with dispatching(app):
        yield app
    app.close()


@pytest.fixture
def plain_app(url: str, tmp_path: Path) -> Iterator[Celery]:
    with new_app(url, tmp_path) as app:
        yield app


def dispatching(app: Celery) -> Any:
    with app.connection_for_write() as connection:
        part = connection.default_channel.worker_part(app._native_delay.settings())
        part.prepare("")
        dispatcher = part.promoter(app.connection_for_write)
    return beside(dispatcher.run, stop=dispatcher.stop)


def store_of(app: Celery) -> Store:
    with app.connection_for_write() as connection:
        store: Store = connection.default_channel.delays.store
        return store


def test_who_comes_after_the_dispatcher_is_told_that_it_is_too_late(
    url: str, tmp_path: Path
) -> None:
    """It has the row's lock while the message is on its way, and then there is no row."""
    app = install(new_app(url, tmp_path), **settings_of(url))
    delay, outcomes = Delay(app), []
    send(app, 1, countdown=3600)  # noqa: F405
    due_us = delay.ls().tasks[0].due_us
    store = store_of(app)
    canceller = Thread(target=lambda: outcomes.append(delay.cancel("order-1")))
    with store.taking(until_us=due_us) as batch:
        canceller.start()
        canceller.join(0.3)
        assert canceller.is_alive()
        batch.delivered += [message.id for message in batch.messages]
    canceller.join(PATIENCE_SECONDS)
    assert [outcome.verdict for outcome in outcomes] == [Verdict.TOO_LATE]
    assert delay.count() == 0
    app.close()


def test_a_store_that_is_away_is_said_to_be(app: Celery, delay: Delay, broker: Broker) -> None:
    send(app, 1, countdown=3600)  # noqa: F405
    store = store_of(app)
    present, store.engine = store.engine, Store("sqlite:////nowhere/delays.db", "x").engine
    try:
        with pytest.raises(RecordsUnavailable, match="unable to open database file"):
            delay.count()
        with pytest.raises(RecordsUnavailable):
            delay.cancel("order-1")
    finally:
        store.engine = present
    assert delay.count() == 1
