"""SQS with a store, and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_native_delay import Delay, NoStore, Rate, install, register_transports
from celery_native_delay.testing import PrivateRedis
from celery_native_delay.texts import digest_of
from celery_native_delay.transports.interface import Wait
from celery_native_delay.transports.sqs import delays
from example_project.private_sqs import PrivateSqs
from tests.integration.sqs_traffic import part_of, url_of
from tests.traffic import beside, inbox, send_task
from tests.waiting import wait_until

pytestmark = pytest.mark.ci


OPTIONS = {"wait_time_seconds": 0, "polling_interval": 0.1}


def new_app(url: str, **settings: Any) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.broker_transport_options = OPTIONS
    return install(app, **settings) if settings else app


def test_without_store_the_error_names_the_setting(shared_sqs: PrivateSqs) -> None:
    with install(new_app(shared_sqs.url)) as app:
        with pytest.raises(NoStore, match="set native_delay_store"):
            Delay(app).ls()
        with pytest.raises(NoStore, match="set native_delay_store"):
            Delay(app).unique(app.signature("shop.remind"), key="user:7")
        assert [task.id for task in app.control.revoke("order-1") or ()] == []  # as ever


def test_a_task_put_back_keeps_its_delivery_id(
    shared_sqs: PrivateSqs, monkeypatch: pytest.MonkeyPatch, short_hops: None
) -> None:
    """Without a relay a task with a long delay reaches a worker after each hop."""
    shared_sqs.wipe()
    monkeypatch.setattr(delays, "_said", set())
    with new_app(shared_sqs.url, declare=True) as app, app.connection_for_write() as connection:
        part = part_of(connection, "lonely")
        send_task(app, 1, countdown=3600, queue="lonely")
        with inbox(connection, "lonely") as arriving:
            (arrival,) = arriving.wait_for(1)
            waited = arrival.message.native_delay
            wait = Wait(arrival.message, "lonely", waited.due_us, waited.delivery_id)
            assert part.put_back([wait]) == [None]
            (again,) = arriving.wait_for(2)[1:]
        assert again.message.native_delay.delivery_id == waited.delivery_id


@pytest.fixture
def app(
    shared_sqs: PrivateSqs, store_redis: PrivateRedis, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Celery]:
    """An installed app with an empty store, whose dispatcher runs."""
    register_transports()
    shared_sqs.wipe()
    monkeypatch.setattr(delays, "_said", set())
    app = new_app(shared_sqs.url, store=store_redis.url)
    with app.connection_for_write() as connection:
        part = part_of(connection, "jobs")
        part.prepare(shared_sqs.url)
        dispatcher = part.promoter(lambda **options: app.connection_for_write(**options))
        with beside(dispatcher.run, stop=dispatcher.stop):
            yield app
    app.close()


def test_standard_queues_are_told_the_tenant_of_each_task(shared_sqs: PrivateSqs) -> None:
    """Of the rate's or the declared key; immediate and delayed, but not in FIFO queues."""
    shared_sqs.wipe()
    rates = {"shop.remind": Rate("10/s", key="header:tenant")}
    with install(new_app(shared_sqs.url), rates=rates) as app:

        def send(tenant: str | None, queue: str = "tenants", **options: Any) -> None:
            headers = {"tenant": tenant} if tenant else {}
            app.send_task("shop.remind", (tenant,), queue=queue, headers=headers, **options)

        send("acme")
        send("initech", countdown=1)
        send(None)
        send("käse & Söhne")
        send("own", MessageGroupId="mine")
        send("acme", queue="ordered.fifo")
        with app.connection_for_read() as connection:
            with inbox(connection, "tenants") as arriving:
                arrivals = arriving.wait_for(5)
            with inbox(connection, "ordered.fifo") as arriving:
                (ordered,) = arriving.wait_for(1)
    groups = {
        arrival.body[0][0]: arrival.message.properties.get("MessageGroupId") for arrival in arrivals
    }
    assert groups.pop("käse & Söhne") == digest_of("käse & Söhne")
    assert groups == {"acme": "acme", "initech": "initech", None: None, "own": "mine"}
    assert "MessageGroupId" not in ordered.message.properties


def test_message_attributes_stay_with_a_task_that_is_moved(
    app: Celery, shared_sqs: PrivateSqs, delay: Delay
) -> None:
    told = {"customer": {"DataType": "Binary", "BinaryValue": b"\0\xff"}}
    send_task(app, 1, countdown=3600, message_attributes=told)
    assert delay.run_now("order-1")

    def messages() -> Any:
        answer = shared_sqs.client.receive_message(
            QueueUrl=url_of(shared_sqs, "jobs"), MessageAttributeNames=["All"]
        )
        return answer.get("Messages")

    (received,) = wait_until(messages)
    assert received["MessageAttributes"]["customer"]["BinaryValue"] == b"\0\xff"
