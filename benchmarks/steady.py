"""Lateness under a steady load of 3,000 delayed messages per second, bases 2, 4 and 16."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from time import monotonic, sleep, time, time_ns
from typing import Any

import kombu
from matplotlib.figure import Figure

from benchmarks.apps import QUEUE, declare_for, make_app
from benchmarks.charts import GREY, OTHERS, OURS, curves_on, figure
from benchmarks.measuring import (
    BROKER_CONFIG,
    Bench,
    Result,
    Target,
    curve,
    lateness_columns,
    percentile,
)
from celery_native_delay.bulk import bulk
from celery_native_delay.testing import private_rabbitmq

WAYS = ((2, 32), (4, 32), (16, 32), (4, 512))
"""Base, and how many unconfirmed messages each level queue passes at a time: 32 by default."""
DEFAULT_PREFETCH = 32
PER_SECOND = 3_000
SECONDS = 60
DELAY_SECONDS = (16, 63)
TICK_SECONDS = 0.02
"""A tick's tasks are sent at once."""
ARGUMENT_BYTES = 200
GRACE_SECONDS = 20
KEEPS_RATE = 0.98

BODY_BEGINS = b"[["
"""Then the task's number, and its due time in microseconds since the epoch."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def run(bench: Bench) -> Result:
    seconds = bench.count(SECONDS, at_least=2)
    shortest, longest = DELAY_SECONDS if bench.scale >= 0.5 else (2, 7)
    result = Result(
        "Steady load",
        f"{PER_SECOND:,} tasks a second for {seconds} s, each with an argument of "
        f"{ARGUMENT_BYTES} bytes, delays of {shortest}-{longest} whole seconds, quorum levels, "
        f"skip routing. One process sends them through bulk(app), every "
        f"{TICK_SECONDS * 1000:g} ms what is to be sent by then; another reads the "
        f"quorum destination queue without acknowledgements.",
    )
    late: dict[tuple[int, int], list[float]] = {}
    for base, prefetch in WAYS:
        with passing(bench, prefetch) as other:
            load = SteadyRun(other, base, seconds, (shortest, longest))
        late[base, prefetch] = load.late_ms
        result.rows.append(
            {
                "base": base,
                "prefetch": prefetch,
                "published/s": load.rate,
                "behind at most ms": load.behind_ms,
                **lateness_columns(load.late_ms),
                "early": sum(late_ms < 0 for late_ms in load.late_ms),
                "doubled": load.doubled,
                "missing": load.missing,
            }
        )
        result.series[_label(base, prefetch)] = curve(load.late_ms)
        if load.rate < KEEPS_RATE * PER_SECOND:
            result.notes.append(
                f"Base {base}: the publisher reached {load.rate:,.0f} of {PER_SECOND:,} messages a "
                f"second, so this is the lateness at that rate."
            )
    result.targets = [Target("p99, base 4", percentile(late[4, 32], 99), "≤", 150, "ms")]
    result.notes.append(
        "Publisher, consumer and broker share the machine's cores. Prefetch is RabbitMQ's "
        "dead_letter_worker_consumer_prefetch: so many unconfirmed messages does each level queue "
        "pass at a time, each of which waits for the disk; with base 2 a message takes more hops, "
        "and the low levels see most of them."
    )
    return result


@contextmanager
def passing(bench: Bench, prefetch: int) -> Iterator[Bench]:
    """The same with a broker that passes *prefetch* messages at a time."""
    if prefetch == DEFAULT_PREFETCH:
        yield bench
        return
    with private_rabbitmq(
        version=bench.broker.version.rpartition(".")[0],
        config=BROKER_CONFIG,
        advanced_config=f"[{{rabbit, [{{dead_letter_worker_consumer_prefetch, {prefetch}}}]}}].",
    ) as broker:
        yield Bench(broker, bench.scale, bench.folder)


def _label(base: int, prefetch: int) -> str:
    return f"base {base}" if prefetch == DEFAULT_PREFETCH else f"base {base}, prefetch {prefetch}"


class SteadyRun:
    """One base under load: how late each message was, and whether the publisher kept its pace."""

    def __init__(
        self, bench: Bench, base: int, seconds: int, delay_seconds: tuple[int, int]
    ) -> None:
        total = seconds * PER_SECOND
        what = f"steady, base {base}"
        context = get_context("spawn")
        processes = []

        def start(target: Any, *arguments: Any) -> Pipe:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            ours.recv()  # it is ready
            return ours

        with bench.vhost() as url:
            try:
                publisher = start(_publish, url, base, total, delay_seconds)
                consumer = start(_consume, url, total)
                publisher.send("go")
                self._follow(bench, f"{what}: publish", publisher, total)
                self.rate, self.behind_ms = publisher.recv()
                # The consumer is not asked while it works: it stops by itself.
                limit = delay_seconds[1] + GRACE_SECONDS
                bench.wait_for(
                    f"{what}: arrive",
                    lambda: 1 if consumer.poll() else 0,
                    1,
                    timeout_seconds=limit,
                )
                if not consumer.poll():
                    consumer.send("stop")
                numbers, late_us = consumer.recv()
            finally:
                for process in processes:
                    process.kill()
                    process.join()
        self.late_ms = [microseconds / 1000 for microseconds in late_us]
        self.doubled = len(numbers) - len(set(numbers))
        self.missing = total - len(set(numbers))

    @staticmethod
    def _follow(bench: Bench, what: str, publisher: Pipe, total: int) -> None:
        """Show how far the publisher is, which tells it once a second and at its end None."""
        with bench.progress(what, total) as done:
            while (published := publisher.recv()) is not None:
                done(published)


def _publish(pipe: Pipe, url: str, base: int, total: int, delay_seconds: tuple[int, int]) -> None:
    """Send *total* tasks at PER_SECOND through :func:`celery_native_delay.bulk.bulk`."""
    delay = random.Random(base).randint
    padding = "." * ARGUMENT_BYTES
    app = make_app("ours", url, base=base)
    declare_for("ours", app)
    pipe.send("ready")
    pipe.recv()
    per_tick = round(PER_SECOND * TICK_SECONDS)
    started = monotonic()
    behind = 0.0
    with bulk(app) as batch:
        for first in range(0, total, per_tick):
            ahead = started + first / PER_SECOND - monotonic()
            behind = max(behind, -ahead)
            sleep(max(0.0, ahead))
            for number in range(first, min(first + per_tick, total)):
                due_us = time_ns() // 1000 + delay(*delay_seconds) * 1_000_000
                due = EPOCH + timedelta(microseconds=due_us)
                batch.send("bench.steady", (number, due_us, padding), eta=due)
            if first % PER_SECOND < per_tick:
                pipe.send(first)
    pipe.send(None)
    pipe.send((total / (monotonic() - started), behind * 1000))
    pipe.recv()


def _consume(pipe: Pipe, url: str, total: int) -> None:
    """Read the queue as fast as its bytes come.

    py-amqp opens the connection and starts to consume; after that only frames are counted,
    because decoding all headers in Python would cost more than the broker's whole work.
    """
    with kombu.Connection(url) as plain, plain.channel() as channel:
        connection = plain.connection
        channel.basic_consume(QUEUE, no_ack=True, callback=None)
        sock = connection.transport.sock
        pipe.send("ready")
        numbers, late_us = array("I"), array("q")
        rest = connection.transport._read_buffer or b""
        sock.settimeout(0.25)
        while len(numbers) < total and not pipe.poll():
            with suppress(TimeoutError):
                rest += sock.recv(1 << 20)
            now_us = int(time() * 1e6)
            rest = rest[_take_bodies(rest, now_us, numbers, late_us) :]
    pipe.send((numbers, late_us))
    pipe.recv()


def _take_bodies(data: bytes, now_us: int, numbers: array[int], late_us: array[int]) -> int:
    """Note every whole body frame in *data*; returns how many bytes are done with.

    A frame is its type (3: body), channel, size, payload and an end octet.
    """
    begin = 0
    while len(data) - begin >= 7:
        end = begin + 8 + int.from_bytes(data[begin + 3 : begin + 7])
        if end > len(data):
            break
        if data[begin] == 3:
            number, due_us, _ = data[begin + len(BODY_BEGINS) + 7 : end].split(b",", 2)
            numbers.append(int(number))
            late_us.append(now_us - int(due_us))
        begin = end
    return begin


def draw(result: Result) -> Figure:
    colours = dict(
        zip((_label(*way) for way in WAYS), (OTHERS[0], OURS, GREY, OTHERS[3]), strict=True)
    )
    picture, (axes,) = figure("3,000 delayed messages per second: how late")
    curves_on(
        axes,
        "at the destination queue",
        [(label, values, colours[label]) for label, values in result.series.items()],
    )
    return picture
