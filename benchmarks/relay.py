"""SQS: how many messages one relay sends on in a second, and what that takes.

On moto, which bounds the rate: it is none of SQS. What a message costs is exact: the relay's own
processor time, and the requests, which are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, process_time, sleep, time
from typing import Any
from uuid import uuid4

from kombu import Connection
from matplotlib.figure import Figure

from benchmarks.charts import bars_on, figure
from benchmarks.measuring import Bench, Result, Target, median, percentile
from celery_native_delay import register_transports
from celery_native_delay.transports.sqs import hops
from celery_native_delay.transports.sqs.delay_queue import ASKED
from celery_native_delay.transports.sqs.entry import Entry, Payload
from celery_native_delay.transports.sqs.hops import BATCH, REQUESTS_PER_HOP
from celery_native_delay.transports.sqs.relay import QueueRelay, Relay
from example_project.private_sqs import PrivateSqs, private_sqs

MESSAGES = 60
"""Moto takes four times as long for twice as many."""
ROUNDS = 9
QUEUE = "bench"
SOURCE = f"{QUEUE}-delay.fifo"
BODY = "e" * 950
"""About as long as a task with one argument, encoded as kombu does."""

WAYS = {"to the destination": 1_500, "back into the delay queue": 3_600_000}
"""What is left of their delays, in milliseconds, with a hop of one second."""


@dataclass(frozen=True)
class Round:
    """What one relay did with *messages* that had all done their wait."""

    messages: int
    seconds: float
    cpu_seconds: float
    requests: Counter[str]

    @property
    def requests_per_batch(self) -> float:
        """Of those that a batch needs; a relay that found nothing has asked for it, too."""
        batches = -(-self.messages // BATCH)
        asked = sum(self.requests.values()) - max(0, self.requests["ReceiveMessage"] - batches)
        return asked / batches


def run(bench: Bench) -> Result:
    register_transports()
    count = bench.count(MESSAGES, at_least=20)
    rounds: dict[str, list[Round]] = {way: [] for way in WAYS}
    total = bench.count(ROUNDS) * len(WAYS)
    with private_sqs() as sqs, bench.progress("relay", total) as done:
        for number in range(bench.count(ROUNDS)):
            for way, left_ms in WAYS.items():
                sqs.wipe()
                fill(sqs, count, left_ms)
                rounds[way].append(relayed(sqs, count))
                done(number * len(WAYS))
    found = {way: [one.messages / one.seconds for one in each] for way, each in rounds.items()}
    result = Result(
        "SQS: one relay",
        f"moto on the same machine, which bounds the rate. {count:,} messages of {len(BODY)} bytes "
        f"that have done a hop wait for one relay, {bench.count(ROUNDS)} rounds. Requests are "
        f"counted as boto3 sends them; processor time is that of the relay's process, boto3 "
        f"included.",
        rows=[
            {
                "sent": way,
                "messages/s": median(found[way]),
                "p5 messages/s": percentile(found[way], 5),
                "requests per batch": median(one.requests_per_batch for one in each),
                "processor µs per message": median(
                    one.cpu_seconds / one.messages * 1e6 for one in each
                ),
            }
            for way, each in rounds.items()
        ],
        targets=[
            Target(
                f"requests for a batch of {BATCH}",
                max(one.requests_per_batch for each in rounds.values() for one in each),
                "≤",
                REQUESTS_PER_HOP,
            ),
        ],
    )
    for way, rates in found.items():
        result.series[way] = [percentile(rates, percent) for percent in (25, 50, 75)]
    return result


def fill(sqs: PrivateSqs, count: int, left_ms: int) -> None:
    """Let *count* messages wait, and return when all of them have."""
    with connected(sqs) as channel:
        url = channel.delays.queues.make_delay_queue(QUEUE)
        channel.queue_declare(queue=QUEUE)
    due_ms = int(time() * 1000) + left_ms
    for first in range(0, count, BATCH):
        entries = [
            Entry(str(uuid4()), left_ms, due_ms, Payload(BODY)).arguments() | {"Id": str(number)}
            for number in range(min(BATCH, count - first))
        ]
        sqs.client.send_message_batch(QueueUrl=url, Entries=entries)

    def ready() -> int:
        answer = sqs.client.get_queue_attributes(QueueUrl=url, AttributeNames=ASKED)
        return int(answer["Attributes"]["ApproximateNumberOfMessages"])

    while ready() < count:
        sleep(0.05)


def relayed(sqs: PrivateSqs, count: int) -> Round:
    requests: Counter[str] = Counter()
    with connected(sqs) as channel:
        channel.sqs().meta.events.register(
            "before-call.sqs", lambda model, **_: requests.update([model.name])
        )
        relay = Relay(lambda: None, [QUEUE])
        line = QueueRelay(relay, channel, QUEUE)
        begin, begin_cpu = perf_counter(), process_time()
        while relay.promoted + relay.relayed < count:
            line.step()
        return Round(count, perf_counter() - begin, process_time() - begin_cpu, requests)


@contextmanager
def connected(sqs: PrivateSqs) -> Iterator[Any]:
    """A channel that delays."""
    hops.HOP_SECONDS = 1
    option = {"native_delay": True}
    with Connection(sqs.url, transport_options=option) as connection:
        yield connection.default_channel


def draw(result: Result) -> Figure:
    picture, (axes,) = figure("SQS: one relay, on moto", height=1.8)
    rows = [(way, middle, (low, high), True) for way, (low, middle, high) in result.series.items()]
    bars_on(axes, "messages per second: median, with the middle half", rows)
    return picture
