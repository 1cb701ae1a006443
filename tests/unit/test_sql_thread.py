"""The thread that writes to a database: a slow database loses no note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import Event
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine

from celery_native_delay.records.sql_thread import SqlThread
from tests.waiting import PATIENCE_SECONDS, wait_until

WRITTEN: list[Mapping[str, Any]] = []
OPENED = Event()


def write(connection: Connection, rows: list[Mapping[str, Any]]) -> None:
    WRITTEN.extend(rows)


@pytest.fixture
def thread() -> Iterator[SqlThread]:
    WRITTEN.clear()
    OPENED.clear()
    engine = create_engine("sqlite://")
    thread = SqlThread(engine, "here", assert_opened, write)
    yield thread
    OPENED.set()
    thread.close()
    engine.dispose()


def assert_opened() -> None:
    assert OPENED.wait(PATIENCE_SECONDS)


def test_notes_are_kept_while_the_database_is_slow(thread: SqlThread) -> None:
    """The first statement takes longer than a caller would wait for an answer."""
    thread.note({"member": 0})
    wait_until(thread._is_stuck)
    thread.note({"member": 1})
    assert thread.ask(lambda connection: True) is None
    OPENED.set()
    wait_until(lambda: len(WRITTEN) == 2)
    assert WRITTEN == [{"member": 0}, {"member": 1}]


def test_notes_beyond_2000_are_counted_as_missed_while_the_database_is_slow(
    thread: SqlThread,
) -> None:
    for number in range(2001):
        thread.note({"member": number})
    wait_until(thread._is_stuck)
    before = thread.missed
    for number in range(2001, 2011):
        thread.note({"member": number})
    assert thread.missed - before >= 9
