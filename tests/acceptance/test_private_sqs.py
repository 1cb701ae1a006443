"""A private SQS server: it gives each message to one consumer and leaves nothing behind."""

from __future__ import annotations

from threading import Thread

import pytest

from example_project.private_sqs import private_sqs, require_sqs
from pytest_celery_native_delay import installed
from tests.processes import assert_nothing_left_when_killed

pytestmark = pytest.mark.ci


@pytest.fixture(autouse=True)
def _is_installed() -> None:
    installed(require_sqs)


def test_concurrent_consumers_get_different_messages() -> None:
    """Plain moto would give the same message to both consumers."""
    with private_sqs() as sqs:
        url = sqs.client.create_queue(QueueName="jobs")["QueueUrl"]
        received: list[str] = []

        def receive() -> None:
            for _ in range(10):
                answer = sqs.client.receive_message(QueueUrl=url, WaitTimeSeconds=2)
                received.extend(message["Body"] for message in answer.get("Messages", []))

        threads = [Thread(target=receive) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(40):
            sqs.client.send_message(QueueUrl=url, MessageBody=str(number))
        for thread in threads:
            thread.join()
        assert sorted(received, key=int) == [str(number) for number in range(40)]


def test_a_restarted_server_is_empty_and_has_the_same_port() -> None:
    with private_sqs() as sqs:
        for end in (sqs.wipe, sqs.stop, sqs.kill):
            sqs.client.create_queue(QueueName="jobs")
            end()
            sqs.start()
            assert "QueueUrls" not in sqs.client.list_queues()


def test_the_server_ends_when_the_test_process_is_killed() -> None:
    assert_nothing_left_when_killed(
        "private_sqs()", "broker.folder", module="example_project.private_sqs"
    )
