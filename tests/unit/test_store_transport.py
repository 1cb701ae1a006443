"""kombu's polling transports with a store: their pauses, and incomplete files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection

from celery_native_delay.transports.sql import transport_of
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture
def polled() -> Iterator[Connection]:
    """A connection that polls its empty broker once an hour."""
    options = {"native_delay": True, "polling_interval": 3600}
    with Connection(
        "memory://", transport=transport_of("memory"), transport_options=options
    ) as connection:
        connection.default_channel.queue_declare("empty")
        connection.default_channel.basic_consume("empty", True, lambda message: None, "tag")
        yield connection


def test_a_waker_ends_the_pause_between_two_polls(polled: Connection) -> None:
    """A worker's threads leave work to its loop, which would only see it after the pause."""
    wake = polled.transport.waker()
    Thread(target=wake).start()
    begun = monotonic()
    with pytest.raises(TimeoutError):
        polled.drain_events(timeout=3600)
    assert monotonic() - begun < PATIENCE_SECONDS


def test_without_a_waker_drain_events_waits_for_its_timeout(polled: Connection) -> None:
    """Only workers ask for a waker."""
    begun = monotonic()
    with pytest.raises(TimeoutError):
        polled.drain_events(timeout=0.2)
    assert monotonic() - begun >= 0.2


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Any]:
    """A queue in a folder, of kombu's broker "filesystem"."""
    options = {
        "native_delay": True,
        "data_folder_in": str(tmp_path),
        "data_folder_out": str(tmp_path),
        "control_folder": str(tmp_path / "control"),
    }
    ours = transport_of("filesystem")
    with Connection("filesystem://", transport=ours, transport_options=options) as connection:
        yield connection.SimpleQueue(f"orders-{uuid4()}")  # kombu remembers bindings


def test_a_file_that_a_producer_still_writes_is_not_consumed(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kombu's own consumer takes such a file, fails and loses it."""
    seen: list[str] = []

    def write(path: Path, data: bytes) -> int:
        seen.append(path.name)
        with path.open("wb") as file:
            return file.write(data)

    monkeypatch.setattr(Path, "write_bytes", write)
    queue.put("whole")
    assert [queue.queue.name in each for each in seen] == [False]
    message = queue.get(block=False)
    assert message.payload == "whole"
    message.ack()


def test_a_file_that_a_producer_without_this_package_still_writes_waits(
    queue: Any, tmp_path: Path
) -> None:
    """kombu's own consumer would end with JSONDecodeError, and lose the message."""
    queue.put("whole")
    (path,) = tmp_path.glob("*.msg")
    whole = path.read_bytes()
    for part in (b"", whole[:20]):
        path.write_bytes(part)
        with pytest.raises(queue.Empty):
            queue.get(block=False)
    path.write_bytes(whole)
    message = queue.get(block=False)
    assert message.payload == "whole"
    message.ack()
