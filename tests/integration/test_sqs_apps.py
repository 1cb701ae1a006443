"""Apps on SQS (moto): ``bulk(app)``, waiting tasks with and without a store, and the commands.

moto refuses whole requests only, so tests of bulk change its answers on their way to the client.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_native_delay import Delay, NoStore, Rate, install
from celery_native_delay.bulk import Bulk, bulk
from celery_native_delay.testing import PrivateRedis
from celery_native_delay.texts import digest_of
from celery_native_delay.transports.interface import Wait
from example_project.private_sqs import PrivateSqs
from tests.integration.project import Project
from tests.integration.sqs_traffic import SHORT_HOPS, delaying, part_of, url_of, waiting_on
from tests.traffic import beside, inbox, publish, send_task
from tests.waiting import PATIENCE_SECONDS, wait_until

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("short_hops")]

HOUR = 3600
NAME = "jobs-delay.fifo"


def new_app(url: str, **settings: Any) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(
        task_default_queue="jobs",
        task_ignore_result=True,
        broker_transport_options={"wait_time_seconds": 0, "polling_interval": 0.1},
    )
    return install(app, **settings)


# ---- bulk ----------------------------------------------------------------------------------------


@pytest.fixture
def app(sqs: PrivateSqs) -> Iterator[Celery]:
    """An installed app whose queue has a delay queue."""
    with delaying(sqs.url) as connection:
        part_of(connection, "jobs").prepare(sqs.url)
    with new_app(sqs.url) as app:
        yield app


def numbers(batch: Bulk) -> list[int]:
    return sorted(json.loads(message.body)[0][0] for message in batch.result.refused)


def assert_waiting(sqs: PrivateSqs, count: int) -> None:
    """Wait until so many messages are in the delay queue; moto's count varies while hops end."""
    wait_until(lambda: waiting_on(sqs) == count)


def test_a_throttled_message_is_sent_again_and_stored_once(sqs: PrivateSqs, app: Celery) -> None:
    """SQS recognises a message that it already has."""
    asked: list[set[str]] = []

    def throttle(parsed: dict[str, Any], **_: Any) -> None:
        if len(asked) < 3:
            asked.append({each["Id"] for each in parsed["Successful"]})
            late = parsed["Successful"].pop()
            failed = {"Id": late["Id"], "SenderFault": False, "Code": "RequestThrottled"}
            parsed["Failed"] = [failed]

    with bulk(app) as batch:
        batch.send("shop.remind", (0,), countdown=HOUR)
        outbox = batch._publisher.outbox
        outbox.settle(timeout_seconds=PATIENCE_SECONDS)
        outbox.channel.sqs().meta.events.register("after-call.sqs.SendMessageBatch", throttle)
        with outbox.lock:
            for number in range(1, 11):
                batch.send("shop.remind", (number,), countdown=HOUR)
    assert batch.result.confirmed == 11
    assert [len(ids) for ids in asked] == [10, 1, 1]
    assert_waiting(sqs, 11)


def test_a_refused_message_is_reported(sqs: PrivateSqs, app: Celery) -> None:
    """The queue takes no message of its size."""
    small = {"MaximumMessageSize": "4096"}
    sqs.client.set_queue_attributes(QueueUrl=url_of(sqs, NAME), Attributes=small)
    with bulk(app, check=False) as batch:
        for number in range(20):
            text = "x" * 8192 if number == 7 else ""
            batch.send("shop.remind", (number, text), countdown=HOUR)
    assert (batch.result.confirmed, numbers(batch)) == (19, [7])
    assert_waiting(sqs, 19)


# ---- waiting tasks -------------------------------------------------------------------------------


def test_without_store_the_error_names_the_setting(sqs: PrivateSqs) -> None:
    with new_app(sqs.url) as app:
        with pytest.raises(NoStore, match="set native_delay_store"):
            Delay(app).ls()
        with pytest.raises(NoStore, match="set native_delay_store"):
            Delay(app).unique(app.signature("shop.remind"), key="user:7")
        assert [task.id for task in app.control.revoke("order-1") or ()] == []  # as ever


def test_a_task_put_back_keeps_its_delivery_id(sqs: PrivateSqs) -> None:
    """Without a relay a task with a long delay reaches a worker after each hop."""
    with new_app(sqs.url) as app, app.connection_for_write() as connection:
        part = part_of(connection, "lonely")
        send_task(app, 1, countdown=HOUR, queue="lonely")
        with inbox(connection, "lonely") as arriving:
            (arrival,) = arriving.wait_for(1)
            waited = arrival.message.native_delay
            wait = Wait(arrival.message, "lonely", waited.due_us, waited.delivery_id)
            assert part.put_back([wait]) == [None]
            (again,) = arriving.wait_for(2)[1:]
        assert again.message.native_delay.delivery_id == waited.delivery_id


def test_standard_queues_are_told_the_tenant_of_each_task(sqs: PrivateSqs) -> None:
    """Of the rate's or the declared key; immediate and delayed, but not in FIFO queues."""
    rates = {"shop.remind": Rate("10/s", key="header:tenant")}
    with new_app(sqs.url, rates=rates) as app:

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
    told = [(each.body[0][0], each.message.properties) for each in arrivals]
    assert {sent: properties.get("MessageGroupId") for sent, properties in told} == {
        "acme": "acme",
        "initech": "initech",
        None: None,
        "käse & Söhne": digest_of("käse & Söhne"),
        "own": "mine",
    }
    assert "MessageGroupId" not in ordered.message.properties


def test_message_attributes_stay_with_a_task_that_is_moved(
    sqs: PrivateSqs, store_redis: PrivateRedis
) -> None:
    told = {"customer": {"DataType": "Binary", "BinaryValue": b"\0\xff"}}
    with new_app(sqs.url, store=store_redis.url) as app, app.connection_for_write() as connection:
        part = part_of(connection, "jobs")
        part.prepare(sqs.url)
        dispatcher = part.promoter(lambda **options: app.connection_for_write(**options))
        with beside(dispatcher.run, stop=dispatcher.stop):
            send_task(app, 1, countdown=HOUR, message_attributes=told)
            assert Delay(app).run_now("order-1")

            def messages() -> Any:
                answer = sqs.client.receive_message(
                    QueueUrl=url_of(sqs, "jobs"), MessageAttributeNames=["All"]
                )
                return answer.get("Messages")

            (received,) = wait_until(messages)
    assert received["MessageAttributes"]["customer"]["BinaryValue"] == b"\0\xff"


# ---- commands ------------------------------------------------------------------------------------

APP = """
from celery import Celery
from kombu import Queue
from celery_native_delay import install

app = install(Celery("shop", broker={url!r}))
app.conf.update(task_queues=[Queue("jobs"), Queue("jobs.fifo")], **{settings!r})
"""


@pytest.fixture
def shop(tmp_path: Path, sqs: PrivateSqs) -> Project:
    return Project(tmp_path).write(APP + SHORT_HOPS, sqs.url)


def test_declare_creates_the_delay_queues_that_doctor_misses(
    shop: Project, sqs: PrivateSqs
) -> None:
    found = shop.told("doctor", status=1)
    (finding,) = found["findings"]
    assert (finding["check"], finding["problem"]) == ("delay queues", f"{NAME}: missing")
    assert "`celery -A PROJ delay declare`" in finding["remedy"]
    assert shop.told("declare") == {"queues": [NAME], "lacking": []}
    assert shop.lines("declare") == [f"{NAME}: ready"]
    assert shop.lines("doctor")[-1] == "healthy, but 1 check(s) could not be made"
    sqs.client.set_queue_attributes(
        QueueUrl=url_of(sqs, NAME), Attributes={"MessageRetentionPeriod": "60"}
    )
    (finding, _) = shop.told("doctor", status=1)["findings"]
    assert finding["problem"] == f"{NAME}: MessageRetentionPeriod is 60, expected 1209600"
    assert finding["remedy"].startswith("aws sqs set-queue-attributes ")


def test_status_counts_by_queue_and_purge_empties_delay_queues_only(
    shop: Project, sqs: PrivateSqs
) -> None:
    shop.delay("declare")
    with delaying(sqs.url) as connection:
        publish(connection, "near", "jobs", delay=1)
        for _ in range(2):
            publish(connection, "far", "jobs", delay=3600)
        assert shop.told("status")["queues"][0]["on_the_way"] == 2
        # A hop takes a second here, and no relay runs.
        wait_until(lambda: shop.told("status")["overdue"] == 2)
        told = shop.told("status")
        assert (told["name"], told["waiting"], told["parked"]) == (NAME, 2, 0)
        *counts, problem, remedy = shop.lines("status")
        assert counts == [
            "queue waiting here in its delay queue",
            "jobs 0 2",
            "waiting about 2",
            "next due unknown (SQS does not tell)",
            "overdue about 2",
        ]
        assert problem.startswith(f"wrong: relaying: {NAME}: about 2 message(s) have done their")
        assert "run `celery -A PROJ delay promote`" in remedy
        assert shop.told("purge", "--force") == {"name": NAME, "purged": 2}
        assert waiting_on(sqs) == 0
        with inbox(connection, "jobs") as received:
            assert received.wait_for(1)[0].body == "near"
    assert shop.told("parked", "list") == {"parked": 0, "messages": []}


def test_uninstall_deletes_empty_delay_queues_only(shop: Project, sqs: PrivateSqs) -> None:
    shop.lines("declare")
    with (shop.folder / "shop.py").open("a") as source:
        source.write("\napp.conf.native_delay_enabled = 'drain'\n")
    with delaying(sqs.url) as connection:
        publish(connection, "far", "jobs", delay=3600)
        refused = shop.delay("uninstall", "--yes")
        assert refused.returncode == 1
        assert "1 task(s) wait" in refused.stderr
        shop.delay("purge", "--yes")
    assert shop.lines("uninstall", "--yes") == [f"removed {NAME}"]
    assert NAME not in str(sqs.client.list_queues())
    assert shop.lines("uninstall", "--yes") == ["nothing to remove"]


def test_a_relay_as_a_process_of_its_own(shop: Project, sqs: PrivateSqs) -> None:
    """It creates the delay queue, and until SIGTERM relays and counts messages."""
    with shop.promoting("-Q", "jobs") as relay:
        with delaying(sqs.url) as connection, inbox(connection, "jobs") as received:
            publish(connection, "hello", "jobs", delay=2.5)
            (arrival,) = received.wait_for(1)
        relay.send_signal(signal.SIGTERM)
        assert relay.communicate()[0] == "1 message(s) promoted, 0 parked\n"
    assert relay.returncode == 0
    assert arrival.lateness_seconds >= 0
