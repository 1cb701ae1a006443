"""The loop that publishes the due tasks of a store, with a store that has no task."""

from __future__ import annotations

from threading import Thread
from typing import Any, cast

import pytest

from celery_native_delay.store.dispatcher import Dispatcher
from celery_native_delay.store.interface import Taken
from tests.waiting import wait_until


class EmptyStore:
    look_seconds = 0.01
    where = "here"

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
