"""pgmq: a delayed message waits in its queue until its visibility timeout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery
from kombu import Connection, Exchange, Queue

from celery_native_delay import NoStore, install
from celery_native_delay.app.doctor import examine
from celery_native_delay.app.installation import delaying_channel
from celery_native_delay.bulk import bulk
from pytest_celery_native_delay import installed
from tests.postgresql import find_postgresql, private_postgresql
from tests.traffic import inbox, publish

pytestmark = pytest.mark.ci

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


def options_of(database: str) -> dict[str, Any]:
    return {
        "conn_string": database,
        "init_extension": False,
        "wait_time_seconds": 0,
        "polling_interval": 0.05,
    }


@pytest.fixture
def connection(database: str) -> Iterator[Any]:
    delaying = {"native_delay": True, **options_of(database)}
    with Connection("pgmq://", transport_options=delaying) as connection:
        yield connection


@pytest.mark.parametrize(
    "queue", [Queue("jobs"), Queue("headlines", NEWS)], ids=["queue", "fanout"]
)
def test_a_message_is_not_delivered_before_its_due_time(connection: Any, queue: Queue) -> None:
    """For queues and for fanout exchanges."""
    with inbox(connection, queue) as received:
        publish(connection, "late", queue.name, exchange=queue.exchange or "", delay=1.4)
        publish(connection, "now", queue.name, exchange=queue.exchange or "")
        now, late = received.wait_for(2)
    assert (now.body, late.body) == ("now", "late")
    assert late.lateness_seconds >= 0


def test_doctor_finds_no_fault_without_store(database: str) -> None:
    app = Celery("shop", broker="pgmq://", set_as_current=False)
    app.conf.broker_transport_options = options_of(database)
    assert examine(install(app)) == []


def test_due_messages_that_nobody_reads_are_found(database: str, connection: Any) -> None:
    app = install(Celery("shop", broker="pgmq://", set_as_current=False))
    app.conf.update(task_default_queue="unread", broker_transport_options=options_of(database))
    Queue("unread")(connection.default_channel).declare()
    publish(connection, "late", "unread", delay=600)
    assert examine(app) == []
    with psycopg.connect(database) as directly:
        directly.execute("UPDATE pgmq.q_unread SET vt = clock_timestamp() - interval '3 minutes'")
    (found,) = examine(app)
    assert found.problem == "no worker reads from unread: 1 message(s) are due for over 1 min"
    connection.default_channel.queue_purge("unread")


def test_bulk_sends_each_task_once(database: str, connection: Any) -> None:
    """Due as asked; a task that PostgreSQL refuses is reported."""
    app = Celery("shop", broker="pgmq://", set_as_current=False)
    app.conf.update(task_default_queue="many", broker_transport_options=options_of(database))
    install(app)
    with inbox(connection, "many") as received:
        with bulk(app, check=False) as batch:
            for number in range(250):
                countdown = (0, 0.5, 1.5)[number % 3]
                headers = {"note": "\0"} if number == 100 else {}
                batch.send("shop.remind", (number,), countdown=countdown, headers=headers)
        came = received.wait_for(249)
    assert (batch.result.sent, batch.result.confirmed) == (250, 249)
    assert [json.loads(each.body)[0][0] for each in batch.result.refused] == [100]
    assert sorted(each.body[0][0] for each in came) == [*range(100), *range(101, 250)]
    assert min(each.lateness_seconds for each in came if each.message.headers["eta"]) >= 0


def test_without_store_commands_count_and_purge_but_list_no_tasks(connection: Any) -> None:
    app = install(Celery("shop", broker="pgmq://", set_as_current=False))
    Queue("jobs")(connection.default_channel).declare()
    publish(connection, "late", "jobs", delay=60)
    channel, settings = delaying_channel(app, connection)
    part = channel.admin_part(settings)
    part.serve([Queue("jobs")])
    assert part.status().facts == {"waiting": 1, "parked": 0}
    assert part.purge() == 1
    with pytest.raises(NoStore, match="set native_delay_store"):
        channel.waiting_tasks(settings)
