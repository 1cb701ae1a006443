"""Delaying connections, relays and delay queues on SQS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kombu import Connection

from celery_native_delay import DelaySettings
from celery_native_delay.transports.sqs.queues import ASKED, waiting_in
from celery_native_delay.transports.sqs.relay import SqsRelay
from example_project.private_sqs import PrivateSqs
from tests.traffic import beside

#: Seconds of one hop; 900 outside of tests.
HOP_SECONDS = 1

#: Source code that sets it in an app of another process.
SHORT_HOPS = f"""
from celery_native_delay.transports.sqs import hops
hops.HOP_SECONDS = {HOP_SECONDS}
"""


def delaying(url: str, *, transport_options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A kombu connection whose messages with an ETA ahead wait in SQS; it does not poll long.

    Its channel is made already: that takes boto3 longer than some delays here.
    """
    options = {"native_delay": settings or True, "wait_time_seconds": 0} | (transport_options or {})
    connection = Connection(url, transport_options=options)
    connection.default_channel  # noqa: B018
    return connection


def part_of(connection: Any, *queues: str) -> Any:
    """The worker's part of the transport, for a worker that consumes *queues*."""
    part = connection.default_channel.worker_part(DelaySettings())
    part.serve(queues)
    return part


@contextmanager
def relaying(connect: Callable[..., Any], *queues: str, **options: Any) -> Iterator[SqsRelay]:
    """Run a relay in a thread, as a worker does."""
    relay = SqsRelay(connect, queues, **options)
    with beside(relay.run, stop=relay.stop):
        yield relay


def url_of(sqs: PrivateSqs, name: str) -> str:
    return str(sqs.client.get_queue_url(QueueName=name)["QueueUrl"])


def names(sqs: PrivateSqs) -> list[str]:
    """The names of all queues."""
    return [url.rpartition("/")[2] for url in sqs.client.list_queues().get("QueueUrls", [])]


def waiting_on(sqs: PrivateSqs, name: str = "jobs-delay.fifo") -> int:
    """The number of messages in a delay queue, including received ones."""
    answer = sqs.client.get_queue_attributes(QueueUrl=url_of(sqs, name), AttributeNames=ASKED)
    return waiting_in(answer["Attributes"])
