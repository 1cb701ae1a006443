"""``bulk(app)`` on SQS: ten messages in a request, of which some may be refused.

moto refuses whole requests only, so these tests change its answers on their way to the client.
tests/conformance has the tests for all brokers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_native_delay import install, register_transports
from celery_native_delay.bulk import Bulk, bulk
from celery_native_delay.transports.sqs import delays
from example_project.private_sqs import PrivateSqs
from tests.integration.sqs_traffic import delaying, part_of, url_of, waiting_on
from tests.waiting import PATIENCE_SECONDS, wait_until

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("short_hops")]

HOUR = 3600


@pytest.fixture
def app(shared_sqs: PrivateSqs, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """An installed app whose queue has a delay queue."""
    register_transports()
    shared_sqs.wipe()
    monkeypatch.setattr(delays, "_said", set())
    with delaying(shared_sqs.url) as connection:
        part_of(connection, "jobs").prepare(shared_sqs.url)
    app = Celery("shop", broker=shared_sqs.url, set_as_current=False)
    app.conf.update(task_default_queue="jobs", task_ignore_result=True)
    yield install(app)
    app.close()


def listen(batch: Bulk, event: str, listener: Callable[..., None]) -> None:
    """Call *listener* on the *event* of each further request of *batch*."""
    events = batch._publisher.outbox.channel.sqs().meta.events
    events.register(f"{event}.sqs.SendMessageBatch", listener)


def numbers(batch: Bulk) -> list[int]:
    return sorted(json.loads(message.body)[0][0] for message in batch.result.refused)


def assert_waiting(sqs: PrivateSqs, count: int) -> None:
    """Wait until so many messages are in the delay queue; moto's count varies while hops end."""
    wait_until(lambda: waiting_on(sqs) == count)


def test_a_throttled_message_is_sent_again_and_stored_once(
    shared_sqs: PrivateSqs, app: Celery
) -> None:
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
        batch._publisher.outbox.settle(timeout_seconds=PATIENCE_SECONDS)
        listen(batch, "after-call", throttle)
        with batch._publisher.outbox.lock:
            for number in range(1, 11):
                batch.send("shop.remind", (number,), countdown=HOUR)
    assert batch.result.confirmed == 11
    assert [len(ids) for ids in asked] == [10, 1, 1]
    assert_waiting(shared_sqs, 11)


def test_a_refused_message_is_reported(shared_sqs: PrivateSqs, app: Celery) -> None:
    """The queue takes no message of its size."""
    sqs = shared_sqs.client
    sqs.set_queue_attributes(
        QueueUrl=url_of(shared_sqs, "jobs-delay.fifo"), Attributes={"MaximumMessageSize": "4096"}
    )
    with bulk(app, check=False) as batch:
        for number in range(20):
            text = "x" * 8192 if number == 7 else ""
            batch.send("shop.remind", (number, text), countdown=HOUR)
    assert batch.result.confirmed == 19
    assert numbers(batch) == [7]
    assert_waiting(shared_sqs, 19)
