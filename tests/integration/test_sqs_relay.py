"""Delays on SQS and the relay: messages are on time after any number of hops, and not lost.

On a moto server, with hops of one second instead of 15 minutes. moto cannot show that AWS
recognises a deduplication id for five minutes after its message was deleted, that AWS keeps the
order of FIFO queues at any throughput, and how AWS throttles and checks permissions.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kombu import Queue

from celery_native_delay import CannotDelay, TopologyMismatch, UnsupportedBroker
from celery_native_delay.transports.sqs import relay as relay_module
from celery_native_delay.transports.sqs.queues import attributes_of
from example_project.private_sqs import PrivateSqs
from tests.integration.sqs_traffic import (
    HOP_SECONDS,
    delaying,
    names,
    part_of,
    relaying,
    url_of,
    waiting_on,
)
from tests.traffic import inbox, publish
from tests.waiting import wait_until

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("short_hops")]

REPOSITORY = Path(__file__).resolve().parents[2]


def make_delay_queue(sqs: PrivateSqs, queue: str = "jobs", **changed: str) -> str:
    """Create the delay queue of *queue*, with some attributes changed; its URL."""
    attributes = {**attributes_of({}), **changed}
    name = f"{queue}-delay.fifo"
    made = sqs.client.create_queue(QueueName=name, Attributes=attributes)
    return str(made["QueueUrl"])


def test_message_attributes_are_kept_over_hops(sqs: PrivateSqs) -> None:
    attributes = {"shop": {"DataType": "String", "StringValue": "Löhne"}}
    received: list[dict[str, Any]] = []
    with delaying(sqs.url) as connection, relaying(lambda: delaying(sqs.url), "jobs"):
        part_of(connection, "jobs").prepare(sqs.url)
        for delay in (1, 2.5):
            publish(connection, delay, "jobs", delay=delay, message_attributes=attributes)
        url = url_of(sqs, "jobs")

        def both_came() -> bool:
            answer = sqs.client.receive_message(QueueUrl=url, MessageAttributeNames=["All"])
            received.extend(answer.get("Messages", []))
            return len(received) == 2

        wait_until(both_came)
    assert [message["MessageAttributes"] for message in received] == [attributes] * 2


#: A relay that dies once it has sent its first messages on, before it deletes them.
DOOMED = f"""
import os, signal, sys
from celery_native_delay import register_transports
from celery_native_delay.transports.sqs import hops, relay
from tests.integration.sqs_traffic import delaying

register_transports()
hops.HOP_SECONDS = {HOP_SECONDS}
relay.VISIBILITY_SECONDS = 2
relay.QueueRelay._delete = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
doomed = relay.SqsRelay(lambda: delaying(sys.argv[1]), ["jobs"])
print("ready", flush=True)
doomed.run()
"""


@pytest.mark.parametrize(
    ("delay", "copies"), [(6.0, 1), (2.0, 2)], ids=["on-the-way", "at-the-end"]
)
def test_a_relay_is_killed_between_sending_and_deleting(
    sqs: PrivateSqs, delay: float, copies: int
) -> None:
    """No message is lost. Between hops none is duplicated, as SQS recognises the second send.

    The last send goes to a standard queue, where there may be two copies of one delivery. moto
    recognises a send while the first message is in the queue, as here; AWS for five minutes.
    """
    make_delay_queue(sqs)
    with delaying(sqs.url) as connection, inbox(connection, "jobs") as received:
        program = [sys.executable, "-c", DOOMED, sqs.url]
        with subprocess.Popen(program, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as doomed:
            assert doomed.stdout is not None
            assert doomed.stdout.readline() == "ready\n"
            publish(connection, "hello", "jobs", delay=delay)
        assert doomed.returncode == -9
        with relaying(lambda: delaying(sqs.url), "jobs"):
            assert received.receive_until(lambda: len(received.arrivals) >= copies)
            wait_until(lambda: waiting_on(sqs) == 0)
            received.receive_until(lambda: False, timeout_seconds=1.5)
    assert len(received.arrivals) == copies
    assert len({each.message.native_delay.delivery_id for each in received.arrivals}) == 1
    assert received.arrivals[0].lateness_seconds >= 0


def test_a_message_that_cannot_be_deleted_is_not_sent_twice(
    sqs: PrivateSqs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a relay without permission to delete would send it every 30 s for 14 days."""
    monkeypatch.setattr(relay_module, "VISIBILITY_SECONDS", 1)
    make_delay_queue(sqs)
    with delaying(sqs.url) as connection, inbox(connection, "jobs") as received:
        publish(connection, "hello", "jobs", delay=1.5)
        relay = relay_module.SqsRelay(lambda: None, [])
        line = relay_module.QueueRelay(relay, connection.default_channel, "jobs")

        def fail(**_: Any) -> None:
            raise ConnectionError("gone")

        events = connection.default_channel.sqs().meta.events
        events.register("before-call.sqs.DeleteMessageBatch", fail)
        for _ in range(2):
            wait_until(lambda: receivable_count(sqs) == 1)
            with pytest.raises(ConnectionError):
                line.step()
        events.unregister("before-call.sqs.DeleteMessageBatch", fail)
        wait_until(lambda: receivable_count(sqs) == 1)
        line.step()
        assert waiting_on(sqs) == 0
        publish(connection, "the last one", "jobs")
        bodies = [arrival.body for arrival in received.wait_for(2)]
        assert sorted(bodies) == ["hello", "the last one"]


def receivable_count(sqs: PrivateSqs) -> int:
    """The number of messages in the delay queue that can be received now."""
    asked = ["ApproximateNumberOfMessages"]
    answer = sqs.client.get_queue_attributes(
        QueueUrl=url_of(sqs, "jobs-delay.fifo"), AttributeNames=asked
    )
    return int(answer["Attributes"][asked[0]])


def test_a_message_that_cannot_be_relayed_does_not_hold_up_others(
    sqs: PrivateSqs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that its destination refuses, and a foreign message."""
    monkeypatch.setattr(relay_module, "VISIBILITY_SECONDS", 1)
    source = make_delay_queue(sqs)
    jobs = sqs.client.create_queue(QueueName="jobs")["QueueUrl"]
    sqs.client.send_message(
        QueueUrl=source, MessageBody="hello", MessageGroupId="x", MessageDeduplicationId="x"
    )
    with (
        delaying(sqs.url) as connection,
        relaying(lambda: delaying(sqs.url), "jobs"),
        inbox(connection, "jobs") as received,
    ):
        publish(connection, "x" * 4096, "jobs", delay=1.5)
        sqs.client.set_queue_attributes(QueueUrl=jobs, Attributes={"MaximumMessageSize": "2048"})
        wait_until(lambda: "jobs refused 1 of 1 message(s)" in caplog.text)
        publish(connection, "hello", "jobs", delay=1.5)
        assert received.receive_until(lambda: len(received.arrivals) == 1)
        assert received.arrivals[0].body == "hello"
        sqs.client.set_queue_attributes(QueueUrl=jobs, Attributes={"MaximumMessageSize": "262144"})
        assert received.receive_until(lambda: len(received.arrivals) == 2)
    assert "message left alone: expected a message that celery_native_delay sent" in caplog.text
    assert waiting_on(sqs) == 1


def test_worker_and_producer_name_each_wrong_attribute(sqs: PrivateSqs) -> None:
    make_delay_queue(sqs, DelaySeconds="3", MessageRetentionPeriod="60")
    with delaying(sqs.url) as connection:
        with pytest.raises(TopologyMismatch) as told:
            part_of(connection, "jobs").prepare(sqs.url)
        assert "jobs-delay.fifo: DelaySeconds is 3, expected 1" in str(told.value)
        assert "jobs-delay.fifo: MessageRetentionPeriod is 60, expected 1209600" in str(told.value)
        with pytest.raises(TopologyMismatch, match="DelaySeconds is 3, expected 1"):
            publish(connection, "hello", "jobs", delay=60)
        publish(connection, "short", "jobs", delay=1)
    assert waiting_on(sqs) == 0


def test_a_missing_predefined_queue_is_named(
    sqs: PrivateSqs, caplog: pytest.LogCaptureFixture
) -> None:
    """With predefined queues neither kombu nor the relay creates any."""
    jobs = sqs.client.create_queue(QueueName="jobs")["QueueUrl"]
    fifo = make_delay_queue(sqs)
    every = {"jobs": {"url": jobs}, "jobs-delay.fifo": {"url": fifo}}
    all_of_them = {"predefined_queues": every}
    without_ours = {"predefined_queues": {"jobs": {"url": jobs}}}

    def connect() -> Any:
        return delaying(sqs.url, transport_options=all_of_them)

    with connect() as connection, relaying(connect, "jobs"), inbox(connection, "jobs") as received:
        part_of(connection, "jobs").prepare(sqs.url)
        publish(connection, "hello", "jobs", delay=2.5)
        (arrival,) = received.wait_for(1)
        assert arrival.lateness_seconds >= 0
    with (
        delaying(sqs.url, transport_options=without_ours) as connection,
        relaying(lambda: delaying(sqs.url, transport_options=without_ours), "jobs"),
    ):
        part_of(connection, "jobs").prepare(sqs.url)
        assert "jobs-delay.fifo is not among predefined_queues: add it" in caplog.text
        publish(connection, "hello", "jobs", delay=3.5)
        assert "it is not among predefined_queues: add it" in caplog.text
    assert "next attempt" not in caplog.text
    assert sorted(names(sqs)) == ["jobs", "jobs-delay.fifo"]


def test_a_producer_warns_if_there_is_no_delay_queue(
    sqs: PrivateSqs, caplog: pytest.LogCaptureFixture
) -> None:
    """The message goes to its own queue and reaches a worker after one hop."""
    with delaying(sqs.url) as connection, inbox(connection, "jobs") as received:
        for _ in range(2):
            publish(connection, "hello", "jobs", delay=60)
        arrivals = received.wait_for(2)
        assert "jobs-delay.fifo: not found, so no relay serves 'jobs'" in caplog.text
        assert caplog.text.count("not found") == 1
        assert [round(60 + each.lateness_seconds) for each in arrivals] == [HOP_SECONDS] * 2


@pytest.mark.parametrize("delay", [1, 60])
def test_a_message_too_large_for_its_destination_is_refused(sqs: PrivateSqs, delay: float) -> None:
    """The delay queue would keep it for 14 days, and SQS would then delete it."""
    sqs.client.create_queue(QueueName="jobs", Attributes={"MaximumMessageSize": "2048"})
    make_delay_queue(sqs)
    with delaying(sqs.url) as connection:
        with pytest.raises(CannotDelay, match=r"(2048 bytes|at most 2,048 bytes.* for 'jobs')"):
            publish(connection, "x" * 4096, "jobs", delay=delay)
        publish(connection, "hello", "jobs", delay=delay)


def test_an_error_of_sqs_names_the_action(sqs: PrivateSqs) -> None:
    """Here attributes that SQS refuses."""
    wrong = {"sqs-creation-attributes": {"Policy": "no JSON"}}
    with delaying(sqs.url, transport_options=wrong) as connection:
        with pytest.raises(UnsupportedBroker, match=r"fifo: expected SQS to do sqs:CreateQueue"):
            part_of(connection, "jobs").prepare(sqs.url)


def test_a_queue_with_too_long_a_name_does_not_stop_the_relay_of_others(
    sqs: PrivateSqs, caplog: pytest.LogCaptureFixture
) -> None:
    """With more than 69 characters there is no room for ``-delay.fifo``."""
    long = "j" * 70
    with (
        delaying(sqs.url) as connection,
        relaying(lambda: delaying(sqs.url), long, "jobs") as relay,
        inbox(connection, "jobs") as received,
    ):
        part = part_of(connection, long, "jobs")
        assert "in jobs-delay.fifo; relaying" in part.prepare(sqs.url)
        assert f"{long}-delay.fifo has 81 characters and SQS takes 80: shorten" in caplog.text
        publish(connection, "far", long, delay=60)
        publish(connection, "hello", "jobs", delay=2.5)
        assert received.wait_for(1)[0].body == "hello"
        assert relay.promoted == 1
        admin = connection.default_channel.admin_part(None)
        admin.serve([Queue(long), Queue("jobs")])
        said, *_ = admin.examine()
        assert said.problem.startswith(f"{long}-delay.fifo: has 81 characters")
    assert "next attempt" not in caplog.text


def test_large_messages_are_relayed_in_several_requests(sqs: PrivateSqs) -> None:
    make_delay_queue(sqs)
    with (
        delaying(sqs.url) as connection,
        relaying(lambda: delaying(sqs.url), "jobs"),
        inbox(connection, "jobs") as received,
    ):
        for number in range(3):
            publish(connection, str(number) * 400_000, "jobs", delay=2.5)
        assert {arrival.body[0] for arrival in received.wait_for(3)} == {"0", "1", "2"}


def test_tasks_for_a_users_fifo_queue_are_sent_at_once(
    sqs: PrivateSqs, caplog: pytest.LogCaptureFixture
) -> None:
    """SQS cannot delay single messages there, so a worker holds the task."""
    with delaying(sqs.url) as connection, inbox(connection, "jobs.fifo") as received:
        publish(connection, "hello", "jobs.fifo", delay=60)
        (arrival,) = received.wait_for(1)
        assert not arrival.waited
    assert "'jobs.fifo' is a FIFO queue" in caplog.text


def test_only_the_apps_queues_are_counted_and_purged(sqs: PrivateSqs) -> None:
    """Other queues of the account belong to other apps."""
    make_delay_queue(sqs)
    make_delay_queue(sqs, "foreign")
    with delaying(sqs.url) as connection:
        publish(connection, "near", "jobs", delay=HOP_SECONDS)
        for queue in ("jobs", "foreign"):
            publish(connection, "far", queue, delay=3600)
        admin = connection.default_channel.admin_part(None)
        admin.serve([Queue("jobs"), Queue("nobody")])
        (jobs, nobody) = admin.status().facts["queues"]
        assert (jobs["here"], jobs["on_the_way"]) == (1, 1)
        assert (nobody["here"], nobody["on_the_way"]) == (0, None)
        assert admin.backlog().waiting == 2
        assert admin.purge() == 1
    assert waiting_on(sqs) == 0
    assert waiting_on(sqs, "foreign-delay.fifo") == 1
    assert "nobody" not in str(sqs.client.list_queues())


def test_while_its_delay_queue_is_gone_a_message_goes_to_its_own_queue(sqs: PrivateSqs) -> None:
    """A producer that knew the delay queue looks again."""
    url = make_delay_queue(sqs)
    with delaying(sqs.url) as connection, inbox(connection, "jobs") as received:
        publish(connection, "lost", "jobs", delay=60)
        sqs.client.delete_queue(QueueUrl=url)
        publish(connection, "hello", "jobs", delay=60)
        assert received.wait_for(1)[0].body == "hello"
