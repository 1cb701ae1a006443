"""The loop that publishes the due tasks of a store, with a store in SQLite and a made-up broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from kombu.exceptions import OperationalError

from celery_native_delay.errors import StoreUnavailable
from celery_native_delay.store import dispatcher as dispatcher_module
from celery_native_delay.store.dispatcher import Dispatcher
from celery_native_delay.store.entry import StoreEntry
from celery_native_delay.store.interface import Row, Store
from celery_native_delay.store.opened import store_at
from tests.traffic import beside
from tests.waiting import wait_until


def made_up_broker() -> Any:
    return Mock(publish=Mock(side_effect=lambda entries: dict.fromkeys(range(len(entries)))))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with closing(store_at(f"sqlite:///{tmp_path}/delays.db", "d", timeout_seconds=5)) as store:
        store.prepare()
        monkeypatch.setattr(store, "look_seconds", 0.01)
        yield store


@pytest.fixture
def asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the dispatcher asks the store, which is away when it first settles something."""
    names: list[str] = []

    def noted(name: str, ask: Callable[..., Any], *args: Any, **options: Any) -> Any:
        names.append(name)
        if name == "settle" and names.count(name) <= 2:
            raise StoreUnavailable("it is away")
        return ask(*args, **options)

    for name in ("take", "settle", "release"):
        monkeypatch.setattr(store, name, partial(noted, name, getattr(store, name)))
    return names


@pytest.mark.parametrize("leads", [True, False])
def test_a_dispatcher_connects_before_a_task_is_due_if_it_leads(
    store: Store, asked: list[str], leads: bool
) -> None:
    """The first due task does not wait for a connection; the others open none in vain."""
    connect = Mock(side_effect=made_up_broker)
    assert leads or store.leads("another")
    dispatcher = Dispatcher(store, connect)
    with beside(dispatcher.run, stop=dispatcher.stop):
        wait_until(lambda: "take" in asked)
        assert connect.call_count == leads


def test_what_is_published_is_noted_as_soon_as_the_store_is_back(
    store: Store, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the lease of the row can end: then it would be published again."""
    monkeypatch.setattr(dispatcher_module, "_RELEASE_SECONDS", 0)
    store.add([Row.of(StoreEntry(0, "", "jobs", {}, b"", "a"))])
    broker = made_up_broker()
    dispatcher = Dispatcher(store, lambda: broker)
    with beside(dispatcher.run, stop=dispatcher.stop):
        wait_until(lambda: asked.count("take") >= 2)
    first = asked.index("take")
    assert asked[first : first + 5] == ["take", "settle", "settle", "settle", "release"]
    assert list(store.tasks(None).ids()) == []
    assert (len(broker.publish.mock_calls), dispatcher.promoted) == (1, 1)


def test_an_outage_of_the_broker_is_one_line_in_the_log(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that cannot be reached is no bug, so no traceback hides the line."""
    refused = OperationalError("connection refused")
    dispatcher = Dispatcher(store, Mock(side_effect=refused))
    with beside(dispatcher.run, stop=dispatcher.stop):
        wait_until(lambda: "OperationalError: connection refused" in caplog.text)
    assert "Traceback" not in caplog.text
