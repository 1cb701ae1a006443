"""Run one steady load: publisher, consumer and broker are separate processes.

Delayed and immediate messages are Celery messages with the same body and queue.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from json import dumps
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from time import monotonic, sleep, time, time_ns
from typing import Any, NoReturn

import amqp
import kombu
from amqp.method_framing import frame_writer
from amqp.spec import Basic

from benchmarks.apps import QUEUE, declare_for, make_app
from benchmarks.measuring import Bench, cpu_seconds, lateness_columns, percentile
from celery_native_delay import DelaySettings
from celery_native_delay.bulk import bulk
from celery_native_delay.transports.rabbitmq.channels import WindowChannel
from celery_native_delay.transports.rabbitmq.topology import Topology

TICK_SECONDS = 0.02
"""The length of a tick in seconds; all tasks of one tick are sent together."""
WINDOW = 1000
ARGUMENT_BYTES = 200
GRACE_SECONDS = 20
KEEPS_RATE = 0.98

IMMEDIATE = "immediate"
BODY_BEGINS = b"[["
"""The beginning of a message body. The task's number and its due time in microseconds follow."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Delays:
    """The delays of a load, in units of the default resolution. A run may use a shorter unit.

    The load of a level queue (a queue with a TTL) depends on the number of messages per second, not
    on its TTL.
    """

    label: str
    units: tuple[int, int]
    step: int
    resolution_ms: int

    def draw(self, random_: random.Random) -> float:
        """Draw a delay in seconds: a multiple of *step* units, or of any length if *step* is 0."""
        shortest, longest = self.units
        if not self.step:
            return random_.uniform(shortest, longest) * self.resolution_ms / 1000
        return random_.randrange(shortest, longest + 1, self.step) * self.resolution_ms / 1000

    @property
    def longest_seconds(self) -> float:
        return self.units[1] * self.resolution_ms / 1000


@dataclass(frozen=True)
class Load:
    """One load: a publish rate, and the delays of its messages unless they are immediate."""

    label: str
    delays: Delays
    per_second: int
    has_target: bool = False

    @property
    def is_delayed(self) -> bool:
        return self.label != IMMEDIATE

    @property
    def mean_hops(self) -> float:
        """The mean number of level queues that a message passes."""
        if not self.is_delayed:
            return 0.0
        topology = Topology(DelaySettings())
        shortest, longest = self.delays.units
        every = range(shortest, longest + 1, self.delays.step or 1)
        return sum(len(topology.path(units)) for units in every) / len(every)


@dataclass
class SteadyRun:
    """A finished load: the lateness of each message, and the publisher's pace."""

    bench: Bench
    load: Load
    seconds: int
    late_ms: list[float] = field(init=False)
    rate: float = field(init=False)

    def __post_init__(self) -> None:
        bench, load = self.bench, self.load
        total = self.seconds * load.per_second
        what = (
            f"steady {bench.broker.version}, {load.label}, {load.delays.label}, {load.per_second}/s"
        )
        broker_pid = bench.broker.pid
        assert broker_pid is not None
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
                publisher = start(_publish, url, load, total)
                consumer = start(_consume, url, total)
                cpu = cpu_seconds(broker_pid)
                publisher.send("go")
                self.rate, self.behind_ms = publisher.recv()
                # Do not wait by sending messages to the consumer: it stops by itself.
                bench.wait_for(
                    f"{what}: arrive",
                    lambda: 1 if consumer.poll() else 0,
                    1,
                    timeout_seconds=load.delays.longest_seconds + GRACE_SECONDS,
                )
                if not consumer.poll():
                    consumer.send("stop")
                numbers, late_us = consumer.recv()
                self.broker_us = (cpu_seconds(broker_pid) - cpu) / total * 1e6
            finally:
                for process in processes:
                    process.kill()
                    process.join()
        self.late_ms = [microseconds / 1000 for microseconds in late_us]
        self.doubled = len(numbers) - len(set(numbers))
        self.missing = total - len(set(numbers))

    @property
    def p99_ms(self) -> float:
        return percentile(self.late_ms, 99)

    @property
    def keeps_up(self) -> bool:
        """True if the publisher reached the requested rate."""
        return self.rate >= KEEPS_RATE * self.load.per_second and not self.missing

    def row(self, bench: Bench) -> dict[str, Any]:
        load = self.load
        queues = len(Topology(DelaySettings()).level_queues) if load.is_delayed else 0
        return {
            "RabbitMQ": bench.broker.version,
            "asked/s": load.per_second,
            "delays": load.delays.label if load.is_delayed else "none",
            "levels": load.label,
            "level queues": queues,
            "hops": load.mean_hops,
            "published/s": self.rate,
            **lateness_columns(self.late_ms),
            "broker CPU µs": self.broker_us,
            "early": sum(late_ms < 0 for late_ms in self.late_ms),
            "doubled": self.doubled,
            "missing": self.missing,
        }


# ---- the publisher ---------------------------------------------------------------------------


def _publish(pipe: Pipe, url: str, load: Load, total: int) -> None:
    """Send *total* delayed tasks at the load's rate."""
    if not load.is_delayed:
        _publish_immediate(pipe, url, load.per_second, total)
        return
    draw = random.Random(1)
    padding = "." * ARGUMENT_BYTES
    app = make_app("ours", url, resolution=load.delays.resolution_ms / 1000)
    declare_for("ours", app)
    with bulk(app, window=WINDOW) as batch:

        def send(number: int) -> None:
            due_us = time_ns() // 1000 + round(load.delays.draw(draw) * 1_000_000)
            due = EPOCH + timedelta(microseconds=due_us)
            batch.send("bench.steady", (number, due_us, padding), eta=due)

        _at_rate(pipe, load.per_second, total, send, lambda: None)


def _publish_immediate(pipe: Pipe, url: str, per_second: int, total: int) -> None:
    """Send immediate messages.

    Celery's message is encoded once. Then its number and time are replaced for each message.
    """
    app = make_app("celery", url)
    declare_for("celery", app)
    number, due_us = 1_234_567_890, 1_234_567_890_123_456
    task = app.amqp.as_task_v2("0" * 36, "bench.steady", (number, due_us, "." * ARGUMENT_BYTES))
    message = amqp.Message(
        dumps(task.body),
        content_type="application/json",
        content_encoding="utf-8",
        delivery_mode=2,
        application_headers=task.headers,
        correlation_id=task.properties["correlation_id"],
    )
    with kombu.Connection(url) as connection:
        connection.connect()
        channel = WindowChannel(connection.connection)
        written = _Written()
        writer = frame_writer(connection.connection, written)
        arguments = b"\0\0" + 2 * (bytes([len(QUEUE)]) + QUEUE.encode()) + b"\1"  # mandatory
        writer(1, channel.channel_id, Basic.Publish, arguments, message)
        head, _, tail = written.frames.rpartition(f"{number}, {due_us}".encode())

        together: list[_Encoded] = []

        def send(number: int) -> None:
            if channel.unsettled_count >= WINDOW:
                channel.read_down_to(WINDOW - 1)
            elif not number % 64:
                channel.read_ready()
            together.append(_Encoded(b"%b%10d, %d%b" % (head, number, time_ns() // 1000, tail)))

        def write() -> None:
            channel.send_all(together)
            together.clear()

        _at_rate(pipe, per_second, total, send, write)


class _Written:
    """A py-amqp transport that collects written frames instead of sending the frames."""

    frames = b""

    def write(self, frames: bytes) -> None:
        self.frames += bytes(frames)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A message encoded as AMQP frames."""

    frames: bytes
    exchange: str = ""
    id: str = ""

    def refused(self, reason: str) -> NoReturn:
        raise AssertionError(reason)


def _at_rate(
    pipe: Pipe,
    per_second: int,
    total: int,
    send: Callable[[int], None],
    after_tick: Callable[[], None],
) -> None:
    pipe.send("ready")
    pipe.recv()
    per_tick = round(per_second * TICK_SECONDS)
    started = monotonic()
    behind = 0.0
    for first in range(0, total, per_tick):
        ahead = started + first / per_second - monotonic()
        behind = max(behind, -ahead)
        sleep(max(0.0, ahead))
        for number in range(first, min(first + per_tick, total)):
            send(number)
        after_tick()
    pipe.send((total / (monotonic() - started), behind * 1000))
    pipe.recv()


# ---- the consumer ----------------------------------------------------------------------------


def _consume(pipe: Pipe, url: str, total: int) -> None:
    """Read the queue's messages as fast as possible.

    py-amqp opens the connection and starts to consume. After that this function only counts frames,
    because decoding all headers in Python would cost more CPU than the broker's work.
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
    """Record every complete body frame in *data*; return the number of processed bytes.

    A frame has a type (3: body), channel, size, payload and an end octet.
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
