"""The loop that publishes the due tasks of a store, with a store and a broker in memory."""

from __future__ import annotations

from threading import Thread
from typing import Any, cast

import pytest
from kombu.exceptions import OperationalError

from celery_native_delay.errors import StoreUnavailable
from celery_native_delay.store import dispatcher as dispatcher_module
from celery_native_delay.store.dispatcher import Dispatcher
from celery_native_delay.store.entry import StoreEntry
from celery_native_delay.store.interface import Taken, TakenRow
from tests.traffic import beside
from tests.waiting import wait_until


class EmptyStore:
    look_seconds = 0.01
    where = "here"

    def leave_thread(self) -> None: ...

    def __init__(self, *, leads: bool) -> None:
        self._leads = leads
        self.looks = 0

    def leads(self, dispatcher: str) -> bool:
        return self._leads

    def resign(self, dispatcher: str) -> None: ...

    def release(self) -> int:
        return 0

    def take(self, *, late_us: int) -> Taken:
        self.looks += 1
        return Taken("", (), 0, None)


class Broker:
    def __init__(self) -> None:
        self.published = 0

    def publish(self, entries: Any) -> dict[int, str | None]:
        self.published += len(entries)
        return dict.fromkeys(range(len(entries)))

    def close(self) -> None: ...


@pytest.mark.parametrize("leads", [True, False])
def test_a_dispatcher_connects_before_a_task_is_due_if_it_leads(leads: bool) -> None:
    """The first due task does not wait for a connection; the others open none in vain."""
    store, brokers = EmptyStore(leads=leads), []

    def connect() -> Any:
        brokers.append(Broker())
        return brokers[-1]

    dispatcher = Dispatcher(cast(Any, store), connect)
    thread = Thread(target=dispatcher.run)
    thread.start()
    wait_until(lambda: store.looks > 0)
    assert len(brokers) == leads
    dispatcher.stop()
    thread.join()


class LeavingStore(EmptyStore):
    """A store with one due row; it is away when it is told that the row was published."""

    def __init__(self) -> None:
        super().__init__(leads=True)
        self.row = TakenRow("a", StoreEntry(0, "", "jobs", {}, b"", "a").encoded(), 0)
        self.asked: list[str] = []
        self.published: list[TakenRow] = []

    def take(self, *, late_us: int) -> Taken:
        rows = () if "take" in self.asked else (self.row,)
        self.asked.append("take")
        return Taken("token", rows, 0, None)

    def release(self) -> int:
        self.asked.append("release")
        return 0

    def settle(self, taken: Taken, published: Any, refused: Any) -> None:
        self.asked.append("settle")
        if self.asked.count("settle") <= 2:
            raise StoreUnavailable("it is away")
        self.published += published


def test_what_is_published_is_noted_as_soon_as_the_store_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the lease of the row can end: then it would be published again."""
    monkeypatch.setattr(dispatcher_module, "_RELEASE_SECONDS", 0)
    store, broker = LeavingStore(), Broker()
    dispatcher = Dispatcher(cast(Any, store), lambda: cast(Any, broker))
    thread = Thread(target=dispatcher.run)
    thread.start()
    wait_until(lambda: store.asked.count("take") >= 2)
    dispatcher.stop()
    thread.join()
    first = store.asked.index("take")
    assert store.asked[first : first + 5] == ["take", "settle", "settle", "settle", "release"]
    assert store.published == [store.row]
    assert (broker.published, dispatcher.promoted) == (1, 1)


def test_an_outage_of_the_broker_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A broker that cannot be reached is no bug, so no traceback hides the line."""

    def connect() -> Any:
        raise OperationalError("connection refused")

    dispatcher = Dispatcher(cast(Any, EmptyStore(leads=True)), connect)
    with beside(dispatcher.run, stop=dispatcher.stop):
        wait_until(lambda: "OperationalError: connection refused" in caplog.text)
    assert "Traceback" not in caplog.text
