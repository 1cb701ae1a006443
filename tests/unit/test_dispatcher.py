"""The loop that publishes the due tasks of a store, with a store in SQLite and a made-up broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

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


class Broker:
    def __init__(self) -> None:
        self.published = 0

    def publish(self, entries: Any) -> dict[int, str | None]:
        self.published += len(entries)
        return dict.fromkeys(range(len(entries)))

    def close(self) -> None: ...


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

    def noting(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            names.append(name)
            if name == "settle" and names.count(name) <= 2:
                raise StoreUnavailable("it is away")
            return ask(*args, **options)

        return noted

    for name in ("take", "settle", "release"):
        monkeypatch.setattr(store, name, noting(name, getattr(store, name)))
    return names


@pytest.mark.parametrize("leads", [True, False])
def test_a_dispatcher_connects_before_a_task_is_due_if_it_leads(
    store: Store, asked: list[str], leads: bool
) -> None:
    """The first due task does not wait for a connection; the others open none in vain."""
    brokers: list[Any] = []

    def connect() -> Any:
        brokers.append(Broker())
        return brokers[-1]

    assert leads or store.leads("another")
    dispatcher = Dispatcher(store, connect)
    with beside(dispatcher.run, stop=dispatcher.stop):
        wait_until(lambda: "take" in asked)
        assert len(brokers) == leads


def test_what_is_published_is_noted_as_soon_as_the_store_is_back(
    store: Store, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the lease of the row can end: then it would be published again."""
    monkeypatch.setattr(dispatcher_module, "_RELEASE_SECONDS", 0)
    store.add([Row.of(StoreEntry(0, "", "jobs", {}, b"", "a"))])
    broker: Any = Broker()
    dispatcher = Dispatcher(store, lambda: broker)
    with beside(dispatcher.run, stop=dispatcher.stop):
        wait_until(lambda: asked.count("take") >= 2)
    first = asked.index("take")
    assert asked[first : first + 5] == ["take", "settle", "settle", "settle", "release"]
    assert list(store.tasks(None).ids()) == []
    assert (broker.published, dispatcher.promoted) == (1, 1)


def test_an_outage_of_the_broker_is_one_line_in_the_log(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that cannot be reached is no bug, so no traceback hides the line."""

    def connect() -> Any:
        raise OperationalError("connection refused")

    dispatcher = Dispatcher(store, connect)
    with beside(dispatcher.run, stop=dispatcher.stop):
        wait_until(lambda: "OperationalError: connection refused" in caplog.text)
    assert "Traceback" not in caplog.text
