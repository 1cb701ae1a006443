"""kombu's polled transports, each with a store beside it, as a worker's loop uses them."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from time import monotonic

import pytest
from kombu import Connection

from celery_native_delay.transports.sql.transport import transport_of
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture
def polled() -> Iterator[Connection]:
    """A connection that looks into its broker once an hour, and finds nothing."""
    options = {"native_delay": True, "polling_interval": 3600}
    with Connection(
        "memory://", transport=transport_of("memory"), transport_options=options
    ) as connection:
        connection.default_channel.queue_declare("empty")
        connection.default_channel.basic_consume("empty", True, lambda message: None, "tag")
        yield connection


def test_a_worker_ends_the_pause_between_two_polls(polled: Connection) -> None:
    """Its threads leave work to its loop, which would find it after the pause."""
    wake = polled.transport.waker()
    Thread(target=wake).start()
    begun = monotonic()
    with pytest.raises(TimeoutError):
        polled.drain_events(timeout=3600)
    assert monotonic() - begun < PATIENCE_SECONDS


def test_a_consumer_of_ones_own_is_not_told_before_its_time_is_up(polled: Connection) -> None:
    """Only a worker asks for a waker."""
    begun = monotonic()
    with pytest.raises(TimeoutError):
        polled.drain_events(timeout=0.2)
    assert monotonic() - begun >= 0.2
