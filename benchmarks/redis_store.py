"""Measure Redis: delaying a message, moving due messages into queues, and a million messages."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import perf_counter
from typing import Any

import kombu
from matplotlib.figure import Figure

from benchmarks.charts import bars_on, figure
from benchmarks.measuring import (
    REDIS_CONFIG,
    Bench,
    Result,
    Target,
    median,
    percentile,
    quartiles,
    quiet,
)
from celery_native_delay.store.interface import Row
from celery_native_delay.testing import PrivateRedis, private_redis
from celery_native_delay.transports.redis.keys import Destination, entry_of
from celery_native_delay.transports.redis.store import BATCH, RedisBrokerStore, Rounds

FEW, MANY = 1_000, 1_000_000
ROUNDS = 60
BLOCK = 50
"""The number of consecutive publishes or adds of one variant."""
PROMOTED = 2_000
"""The number of messages that one round moves into their queues."""
WINDOW = 1_000
FAR_US = 3_600_000_000

ENVELOPE = "e" * 700
"""An envelope (encoded message) about as long as the message of a task with one argument."""
QUEUE = "bench"


@dataclass
class Pending:
    """Measurements of a Redis in which *count* messages wait that are due in an hour."""

    count: int
    redis: PrivateRedis
    store: RedisBrokerStore
    rounds: Rounds
    bytes_each: float = 0.0
    """The bytes of Redis' memory per message, without the envelope (encoded message)."""
    add_seconds: list[float] = field(default_factory=list)
    """The time to add one message: the median of each round."""
    promote_seconds: list[float] = field(default_factory=list)
    """The time to move a full batch of due messages into queues, from one answer to the next.
    """
    script_us: float = 0.0
    """The time that the script in Redis itself takes for a full batch of due messages."""

    @property
    def per_second(self) -> float:
        return BATCH / median(self.promote_seconds)


def run(bench: Bench) -> Result:
    rounds = bench.count(ROUNDS, at_least=5)
    few, many = bench.count(FEW, at_least=100), bench.count(MANY, at_least=2_000)
    with pending(bench, few) as small, pending(bench, many) as large:
        order = random.Random(4)
        with quiet(), bench.progress("redis-store, add and promote", rounds) as done:
            for number in range(rounds):
                for one in order.sample([small, large], 2):
                    gc.collect()
                    add_some(one, number)
                    promote_some(one, number)
                done(number + 1)
        for one in (small, large):
            one.script_us = script_us(one)
    pushed, delayed, server = publish_costs(bench, rounds)
    result = Result(
        "Redis: cost of waiting",
        f"{server}, with an append-only file. Add: one message through the store, {BLOCK} times in "
        f"a row, alternating with {few:,} and with {many:,} waiting messages, {rounds} rounds. "
        f"Promote: {PROMOTED:,} due messages in batches of {BATCH}, by a client that does nothing "
        f"else. Like a worker, it requests the next batch before it reads the result of the last. "
        f"Memory: the growth of Redis' used_memory per message, without the envelope of "
        f"{len(ENVELOPE)} bytes. Publish: kombu's Producer.publish() of the same message, delayed "
        f"and immediate, {BLOCK} times in a row.",
        rows=[
            {
                "pending": one.count,
                "add p50 µs": median(one.add_seconds) * 1e6,
                "promote, messages/s": one.per_second,
                "batch p50 ms": median(one.promote_seconds) * 1e3,
                "batch p99 ms": percentile(one.promote_seconds, 99) * 1e3,
                "script ms": one.script_us / 1e3,
                "bytes over the envelope": one.bytes_each,
            }
            for one in (small, large)
        ],
        targets=[
            Target("promoted in a second", large.per_second, "≥", 100_000, "messages"),
            Target(f"the script, for {BATCH} messages", large.script_us / 1e3, "≤", 1, "ms"),
            Target(
                f"add, {many:,} : {few:,} pending",
                median(large.add_seconds) / median(small.add_seconds),
                "≤",
                1.3,
            ),
            Target(
                f"promote, {many:,} : {few:,} pending",
                median(large.promote_seconds) / median(small.promote_seconds),
                "≤",
                1.3,
            ),
            Target(f"over the envelope, {many:,} pending", large.bytes_each, "≤", 500, "bytes"),
            Target("publish, delayed : immediate", median(delayed) / median(pushed), "≤", 2.5),
        ],
    )
    result.notes.append(
        f"kombu's publish: p50 {median(pushed) * 1e6:.0f} µs for an immediate message (a LPUSH), "
        f"{median(delayed) * 1e6:.0f} µs for a delayed one."
    )
    for label, seconds in (
        ("publish, immediate", pushed),
        ("publish, delayed", delayed),
        (f"add, {few:,} pending", small.add_seconds),
        (f"add, {many:,} pending", large.add_seconds),
    ):
        result.series[label] = quartiles(each * 1e6 for each in seconds)
    for one in (small, large):
        rates = quartiles(BATCH / seconds for seconds in one.promote_seconds)
        result.series[f"promote, {one.count:,} pending"] = rates
    return result


# ---- many that wait --------------------------------------------------------------------------


@contextmanager
def pending(bench: Bench, count: int) -> Iterator[Pending]:
    """Yield a private Redis with *count* waiting messages. It makes no snapshot and no rewrite."""
    with (
        private_redis(config=REDIS_CONFIG + "auto-aof-rewrite-percentage 0") as redis,
        delaying(redis) as client,
        ExitStack() as stack,
    ):
        channel = client.default_channel
        delays, connection = channel.delays, channel.pool.make_connection()
        rounds = Rounds(connection, delays.keys, version=delays.version)
        stack.callback(rounds.close)
        rounds.connect()
        one = Pending(count, redis, delays.own, rounds)
        before = used_bytes(one)
        begin_us = one.store.now_us() + FAR_US
        fill(bench, one, f"redis-store: {count:,} pending", count, lambda index: begin_us + index)
        one.bytes_each = (used_bytes(one) - before) / count - len(ENVELOPE)
        yield one


def fill(bench: Bench, one: Pending, what: str, count: int, due_us: Callable[[int], int]) -> None:
    with bench.progress(what, count) as done:
        for first in range(0, count, WINDOW):
            store_all(one, what, range(first, min(first + WINDOW, count)), due_us)
            done(first)


def store_all(one: Pending, name: str, numbers: range, due_us: Callable[[int], int]) -> None:
    with one.store.client.pipeline(transaction=False) as pipe:
        for number in numbers:
            method, arguments = one.store.add_command(row(member(name, number), due_us(number)))
            getattr(pipe, method)(*arguments)
        pipe.execute()


ENTRY = entry_of(Destination((QUEUE,)), ENVELOPE)


def row(name: str, due_us: int) -> Row:
    return Row(name, name, due_us, ENTRY)


def member(name: str, number: int) -> str:
    """Return a sorted-set member as long as a real one: a UUID, a colon and 12 characters."""
    return f"{name[-20:]:_>24}{number:012}:{number % 10**12:012}"


def used_bytes(one: Pending) -> int:
    return int(one.redis.client.info("memory")["used_memory"])


def add_some(one: Pending, number: int) -> None:
    """Add a few messages that are due after all other messages, and measure the time."""
    due_us = one.store.now_us() + 2 * FAR_US
    block = []
    for index in range(BLOCK):
        name = member("added", number * BLOCK + index)
        started = perf_counter()
        one.store.add([row(name, due_us)])
        block.append(perf_counter() - started)
    one.add_seconds.append(median(block))


def promote_some(one: Pending, number: int) -> None:
    """Add due messages and move them into their queues; only full batches are measured."""
    now_us = one.store.now_us()
    numbers = range(number * PROMOTED, (number + 1) * PROMOTED)
    store_all(one, "promoted", numbers, lambda index: now_us - 1 - index % 100)
    one.rounds.ask()
    while True:
        started = perf_counter()
        one.rounds.ask()
        handed = one.rounds.answer()
        seconds = perf_counter() - started
        if handed.taken < BATCH:
            break
        one.promote_seconds.append(seconds)
    one.rounds.answer()
    one.redis.client.delete(QUEUE)


def script_us(one: Pending) -> float:
    """Return the median of microseconds per full batch, as Redis' slow log has them."""
    now_us = one.store.now_us()
    store_all(one, "script", range(PROMOTED), lambda index: now_us - 1)
    client = one.redis.client
    for name, value in (("slowlog-max-len", 1_000), ("slowlog-log-slower-than", 0)):
        client.config_set(name, value)
    client.slowlog_reset()
    for _ in range(PROMOTED // BATCH):
        one.rounds.ask()
        one.rounds.answer()
    entries = client.slowlog_get(-1)
    return median(e["duration"] for e in entries if e["command"].upper().startswith(b"EVALSHA "))


# ---- kombu's own publish ---------------------------------------------------------------------


def publish_costs(bench: Bench, rounds: int) -> tuple[list[float], list[float], str]:
    """Return the seconds of each immediate publish and of each delayed publish, and the server's
    name.
    """
    pushed: list[float] = []
    delayed: list[float] = []
    with private_redis(config=REDIS_CONFIG) as redis, delaying(redis) as connection:
        send = connection.Producer().publish
        order = random.Random(5)
        for _ in range(2 * BLOCK):  # warm up
            timed(send, headers_in(3600))
            timed(send, {})
        with quiet(), bench.progress("redis-store, publish", rounds) as done:
            for number in range(rounds):
                for seconds, hours in order.sample([(pushed, 0), (delayed, 1)], 2):
                    gc.collect()
                    for _ in range(BLOCK):
                        seconds.append(timed(send, headers_in(3600 * hours) if hours else {}))
                done(number + 1)
        waiting = redis.client.zcard(connection.default_channel.delays.keys.due)
        assert waiting == len(delayed) + 2 * BLOCK, waiting
        return pushed, delayed, str(redis.installation)


def timed(send: Callable[..., object], headers: dict[str, Any]) -> float:
    started = perf_counter()
    send(ENVELOPE, routing_key=QUEUE, headers={"id": "task-1", **headers})
    return perf_counter() - started


def headers_in(seconds: float) -> dict[str, str]:
    return {"eta": (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()}


def delaying(redis: PrivateRedis) -> Any:
    return kombu.Connection(redis.url, transport_options={"native_delay": True})


def draw(result: Result) -> Figure:
    picture, (cost, rate) = figure("Redis: adding and moving messages", height=4.6, rows=2)
    for axes, unit, title, wanted in (
        (cost, "microseconds", "time to publish one message (median; the line: p25 to p75)", True),
        (rate, "messages per second", f"due messages moved, {BATCH} per batch", False),
    ):
        axes.set_title(title, fontsize=10, loc="left")
        rows = [
            (label, middle, (low, high), label != "publish, immediate")
            for label, (low, middle, high) in result.series.items()
            if wanted is not label.startswith("promote")
        ]
        bars_on(axes, unit, rows)
    return picture
