"""On pgmq messages wait in their queue, invisible: PostgreSQL itself delays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery
from kombu import Connection, Exchange, Queue

from celery_native_delay import UnsupportedBroker, install
from celery_native_delay.celery_app.install import delaying_channel
from pytest_celery_native_delay import installed
from tests.postgresql import find_postgresql, private_postgresql
from tests.traffic import inbox, publish

pytest.importorskip("celery_native_delay.transports.pgmq", reason="kombu before 5.7")
pgmq = pytest.importorskip("pgmq.install")

NEWS = Exchange("news", type="fanout")


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    installed(find_postgresql)
    with private_postgresql() as server:
        url = server.new_database().replace("+psycopg", "")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(pgmq.get_embedded_install_sql())
            yield connection.info.dsn  # pgmq takes no URL of a socket


@pytest.fixture
def connection(database: str) -> Iterator[Any]:
    options = {
        "conn_string": database,
        "init_extension": False,
        "wait_time_seconds": 0,
        "polling_interval": 0.05,
    }
    delaying = {"native_delay": True, **options}
    with Connection("pgmq://", transport_options=delaying) as connection:
        yield connection


@pytest.mark.parametrize(
    "queue", [Queue("jobs"), Queue("headlines", NEWS)], ids=["queue", "fanout"]
)
def test_a_message_arrives_when_it_is_due_and_not_before(connection: Any, queue: Queue) -> None:
    """To the second, for every way that kombu takes to pgmq."""
    with inbox(connection, queue) as received:
        publish(connection, "late", queue.name, exchange=queue.exchange or "", delay=1.4)
        publish(connection, "now", queue.name, exchange=queue.exchange or "")
        now, late = received.wait_for(2)
    assert (now.body, late.body) == ("now", "late")
    assert 0 <= late.lateness_seconds < 10


def test_the_command_line_says_that_it_has_nothing_to_do_there(connection: Any) -> None:
    app = install(Celery("shop", broker="pgmq://", set_as_current=False))
    with pytest.raises(UnsupportedBroker, match="delays by itself: there is nothing to ask"):
        delaying_channel(app, connection)
