"""SQS with records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

from celery_native_delay import (
    Delay,
    DelaySettings,
    NoRecords,
    UnsupportedBroker,
    install,
    register_transports,
)
from celery_native_delay.testing import PrivateRedis
from celery_native_delay.transports.interface import Answer, Wait
from celery_native_delay.transports.sqs import delays
from celery_native_delay.transports.sqs import relay as relay_module
from example_project.private_sqs import PrivateSqs
from tests.integration.sqs_traffic import part_of, relaying, url_of, waiting_on
from tests.traffic import eta_in, inbox, send_task
from tests.waiting import wait_until

pytestmark = pytest.mark.ci


OPTIONS = {"wait_time_seconds": 0, "polling_interval": 0.1}


def new_app(url: str, **settings: Any) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.broker_transport_options = OPTIONS
    return install(app, **settings) if settings else app


@pytest.fixture
def app(
    shared_sqs: PrivateSqs, records_redis: PrivateRedis, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Celery]:
    """An installed app with empty records, on an SQS with one delay queue."""
    register_transports()
    shared_sqs.wipe()
    monkeypatch.setattr(delays, "_said", set())
    monkeypatch.setattr(relay_module, "LONG_POLL_SECONDS", 1)
    app = new_app(shared_sqs.url, records=records_redis.url)
    with app.connection_for_write() as connection:
        part_of(connection, "jobs").prepare(shared_sqs.url)
    yield app
    app.close()


def receipts_on(connection: Any) -> Any:
    return connection.default_channel.worker_part(DelaySettings()).receipts()


def test_without_records_the_error_names_the_setting(shared_sqs: PrivateSqs) -> None:
    with install(new_app(shared_sqs.url)) as app:
        with pytest.raises(NoRecords, match="set native_delay_records"):
            Delay(app).ls()
        with pytest.raises(UnsupportedBroker, match="SQS or pgmq with native_delay_records"):
            Delay(app).unique(app.signature("shop.remind"), key="user:7")
        assert [task.id for task in app.control.revoke("order-1") or ()] == []  # as ever


@pytest.mark.usefixtures("short_hops")
def test_a_task_stays_listed_over_all_hops(
    app: Celery, shared_sqs: PrivateSqs, delay: Delay
) -> None:
    """A task that is cancelled meanwhile is dropped at the end, another one runs."""
    with app.connection_for_write() as connection, relaying(app.connection_for_write, "jobs"):
        for number in (1, 2):
            send_task(app, number, countdown=4)
        (first,), (second,) = delay.show("order-1"), delay.show("order-2")
        wait_until(lambda: waiting_on(shared_sqs, "jobs-delay.fifo") == 2)
        assert delay.cancel("order-1")
        receipts = receipts_on(connection)
        with inbox(connection, "jobs") as arriving:
            came = {
                arrival.message.native_delay.delivery_id: arrival.message
                for arrival in arriving.wait_for(3)
            }
    assert {first.delivery_id, second.delivery_id} < came.keys()
    answers = {
        delivery_id: receipts.may_run(message.headers, message.native_delay)
        for delivery_id, message in came.items()
    }
    assert answers.pop(first.delivery_id) is Answer.DROP
    assert set(answers.values()) == {Answer.RUN}
    assert delay.count() == 0


@pytest.mark.usefixtures("short_hops")
def test_a_task_put_back_keeps_its_delivery_id_and_stays_listed(app: Celery, delay: Delay) -> None:
    """Without a relay a task with a long delay reaches a worker after each hop."""
    send_task(app, 1, countdown=3600, queue="lonely")
    (task,) = delay.show("order-1")
    with app.connection_for_write() as connection:
        part = part_of(connection, "lonely")
        channel = connection.default_channel
        with inbox(connection, "lonely") as arriving:
            (arrival,) = arriving.wait_for(1)
            wait = Wait(arrival.message, "lonely", task.due_us, task.delivery_id)
            assert part.put_back([wait]) == [None]
            assert delay.cancel("order-1")
            assert part.put_back([wait]) == [None]
            assert delay.count() == 0, "a message that is void is not listed again"
        assert channel.delays.records.received(f"order-1:{task.delivery_id}") is False


def test_each_copy_of_a_task_for_several_queues_is_listed_and_moved(
    app: Celery, shared_sqs: PrivateSqs, delay: Delay
) -> None:
    orders = Exchange("orders", type="topic")
    queues = [Queue(name, orders, routing_key="new.#") for name in ("ship", "bill")]
    with app.connection_for_write() as connection, inbox(connection, *queues) as arriving:
        producer = connection.Producer()
        headers = {"task": "shop.remind", "id": "order-1", "eta": eta_in(3600)}
        producer.publish("…", exchange=orders, routing_key="new.today", headers=headers)
        assert sorted(task.queue for task in delay.show("order-1")) == ["bill", "ship"]
        assert delay.run_now("order-1")
        came = arriving.wait_for(2)
        receipts = receipts_on(connection)
        for arrival in came:
            wait = arrival.message.native_delay
            assert receipts.may_run(arrival.message.headers, wait) is Answer.RUN
    assert sorted(arrival.message.consumed_from for arrival in came) == ["bill", "ship"]


def test_a_task_that_sqs_refuses_is_not_listed(app: Celery, delay: Delay) -> None:
    with pytest.raises(Exception, match="at most"):
        app.send_task("shop.remind", ("x" * 1_100_000,), countdown=60, queue="jobs")
    assert delay.count() == 0


def test_message_attributes_stay_with_a_task_that_is_moved(
    app: Celery, shared_sqs: PrivateSqs, delay: Delay
) -> None:
    told = {"customer": {"DataType": "Binary", "BinaryValue": b"\0\xff"}}
    send_task(app, 1, countdown=3600, message_attributes=told)
    assert delay.run_now("order-1")
    answer = shared_sqs.client.receive_message(
        QueueUrl=url_of(shared_sqs, "jobs"), MessageAttributeNames=["All"]
    )
    (received,) = answer["Messages"]
    assert received["MessageAttributes"]["customer"]["BinaryValue"] == b"\0\xff"
