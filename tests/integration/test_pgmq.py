"""pgmq without a store: a delayed message waits in its queue until its visibility timeout.

tests/conformance has the tests for all brokers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery
from kombu import Exchange, Queue

from celery_native_delay import NoStore, install
from celery_native_delay.app.doctor import examine
from celery_native_delay.app.installation import delaying_channel
from celery_native_delay.bulk import bulk
from tests.conformance.brokers import Broker, options_of, running_broker
from tests.traffic import JOBS, inbox, publish

pytestmark = pytest.mark.ci

pytest.importorskip("celery_native_delay.transports.pgmq", reason="kombu before 5.7")


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_broker("pgmq", pytest.fail) as broker:
        yield broker


@pytest.fixture
def app(url: str) -> Iterator[Celery]:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(task_default_queue=JOBS, broker_transport_options=options_of(url))
    with install(app):
        yield app


@pytest.fixture
def connection(app: Celery) -> Iterator[Any]:
    with app.connection_for_write() as connection:
        yield connection


def test_a_message_to_a_fanout_exchange_is_not_delivered_before_its_due_time(
    connection: Any,
) -> None:
    queue = Queue("headlines", Exchange("news", type="fanout"))
    with inbox(connection, queue) as received:
        publish(connection, "late", queue.name, exchange=queue.exchange, delay=1.4)
        publish(connection, "now", queue.name, exchange=queue.exchange)
        now, late = received.wait_for(2)
    assert (now.body, late.body) == ("now", "late")
    assert late.lateness_seconds >= 0


def test_due_messages_that_nobody_reads_are_found(app: Celery, connection: Any) -> None:
    """Nothing else: it needs no store."""
    assert examine(app) == []
    publish(connection, "late", JOBS, delay=600)
    assert examine(app) == []
    with psycopg.connect(options_of(app.conf.broker_url)["conn_string"]) as directly:
        directly.execute("UPDATE pgmq.q_jobs SET vt = clock_timestamp() - interval '3 minutes'")
    (found,) = examine(app)
    assert found.problem == "no worker reads from jobs: 1 message(s) are due for over 1 min"


def test_bulk_sends_each_task_once(app: Celery, connection: Any) -> None:
    """Due as asked; a task that PostgreSQL refuses is reported."""
    with inbox(connection, JOBS) as received:
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


def test_without_store_commands_count_and_purge_but_list_no_tasks(
    app: Celery, connection: Any
) -> None:
    publish(connection, "late", JOBS, delay=60)
    channel, settings = delaying_channel(app, connection)
    part = channel.admin_part(settings)
    part.serve([Queue(JOBS)])
    assert part.status().facts == {"waiting": 1, "parked": 0}
    assert part.purge() == 1
    with pytest.raises(NoStore, match="set native_delay_store"):
        channel.waiting_tasks(settings)
