"""Measure Redis: adding a message, moving due messages into queues, and a million messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter

import kombu
from matplotlib.figure import Figure

from benchmarks.charts import bars_on, figure
from benchmarks.measuring import (
    Bench,
    Result,
    Target,
    alternate,
    block_of,
    median,
    percentile,
    quartiles,
)
from celery_native_delay.store.interface import Row
from celery_native_delay.testing import PrivateRedis
from celery_native_delay.transports.redis.keys import Destination, entry_of
from celery_native_delay.transports.redis.store import BATCH, RedisBrokerStore, Rounds

FEW, MANY = 1_000, 1_000_000
ROUNDS = 60
BLOCK = 50
"""The number of messages that are added in a row."""
PROMOTED = 2_000
"""The number of messages that one round moves into their queues."""
WINDOW = 1_000
FAR_US = 3_600_000_000

ENVELOPE = "e" * 700
"""An envelope (encoded message) about as long as the message of a task with one argument."""
QUEUE = "bench"


@dataclass
class Pending:
    """A Redis in which *count* messages wait that are due in an hour."""

    count: int
    redis: PrivateRedis
    store: RedisBrokerStore
    rounds: Rounds
    bytes_each: float = 0.0
    """The bytes of Redis' memory per message, without the envelope (encoded message)."""
    numbers: int = 0
    """How many messages were added by :meth:`add`."""

    def add_all(self, name: str, numbers: range, due_us: Callable[[int], int]) -> None:
        with self.store.client.pipeline(transaction=False) as pipe:
            for number in numbers:
                row = row_of(name, number, due_us(number))
                method, arguments = self.store.add_command(row)
                getattr(pipe, method)(*arguments)
            pipe.execute()

    def add(self) -> list[float]:
        """Add messages that are due after all others; return the median of the seconds of each."""
        due_us, first = self.store.now_us() + 2 * FAR_US, self.numbers
        self.numbers += BLOCK
        add = block_of(lambda at: self.store.add([row_of("added", first + at, due_us)]), BLOCK)
        return [median(add.seconds)]

    def promote(self) -> list[float]:
        """Move due messages into their queue; return the seconds of each full batch.

        They are from one answer of Redis to the next.
        """
        now_us = self.store.now_us()
        self.add_all("promoted", range(PROMOTED), lambda number: now_us - 1 - number % 100)
        seconds = []
        self.rounds.ask()
        while True:
            started = perf_counter()
            self.rounds.ask()
            handed = self.rounds.answer()
            took = perf_counter() - started
            if handed.taken < BATCH:
                break
            seconds.append(took)
        self.rounds.answer()
        self.redis.client.delete(QUEUE)
        return seconds

    def script_us(self) -> float:
        """Return the median of microseconds per full batch, as Redis' slow log has them."""
        now_us = self.store.now_us()
        self.add_all("script", range(PROMOTED), lambda _: now_us - 1)
        client = self.redis.client
        for name, value in (("slowlog-max-len", 1_000), ("slowlog-log-slower-than", 0)):
            client.config_set(name, value)
        client.slowlog_reset()
        for _ in range(PROMOTED // BATCH):
            self.rounds.ask()
            self.rounds.answer()
        entries = client.slowlog_get(-1)
        scripts = (each for each in entries if each["command"].upper().startswith(b"EVALSHA "))
        return median(each["duration"] for each in scripts)


def run(bench: Bench) -> Result:
    rounds = bench.count(ROUNDS, at_least=5)
    few, many = bench.count(FEW, at_least=100), bench.count(MANY, at_least=2_000)
    with pending(bench, few) as small, pending(bench, many) as large:
        both = (small, large)
        ways = {f"add, {one.count:,} pending": one.add for one in both}
        ways |= {f"promote, {one.count:,} pending": one.promote for one in both}
        by_round = alternate("redis-store", rounds, ways)
        script_ms = [one.script_us() / 1e3 for one in both]
        server = str(small.redis.installation)
    seconds = {way: [each for block in found for each in block] for way, found in by_round.items()}
    small_add, large_add, small_batch, large_batch = map(median, seconds.values())
    result = Result(
        "Redis: cost of waiting",
        f"{server}, with an append-only file. Add: one message through the store, {BLOCK} times in "
        f"a row, alternating with {few:,} and with {many:,} waiting messages, {rounds} rounds. "
        f"Promote: {PROMOTED:,} due messages in batches of {BATCH}, by a client that does nothing "
        f"else. Like a worker, it requests the next batch before it reads the result of the last. "
        f"Memory: the growth of Redis' used_memory per message, without the envelope of "
        f"{len(ENVELOPE)} bytes.",
    )
    measured = ((small_add, small_batch), (large_add, large_batch))
    for one, (add, batch), script in zip(both, measured, script_ms, strict=True):
        row = {
            "pending": one.count,
            "add p50 µs": add * 1e6,
            "promote, messages/s": BATCH / batch,
            "batch p50 ms": batch * 1e3,
            "batch p99 ms": percentile(seconds[f"promote, {one.count:,} pending"], 99) * 1e3,
            "script ms": script,
            "bytes over the envelope": one.bytes_each,
        }
        result.rows.append(row)
    more = f"{many:,} : {few:,} pending"
    result.targets = [
        Target("promoted in a second", BATCH / large_batch, "≥", 100_000, "messages"),
        Target(f"the script, for {BATCH} messages", script_ms[1], "≤", 1, "ms"),
        Target(f"add, {more}", large_add / small_add, "≤", 1.3),
        Target(f"promote, {more}", large_batch / small_batch, "≤", 1.3),
        Target(f"over the envelope, {many:,} pending", large.bytes_each, "≤", 500, "bytes"),
    ]
    for way, found in seconds.items():
        is_rate = way.startswith("promote")
        result.series[way] = quartiles(BATCH / each if is_rate else each * 1e6 for each in found)
    return result


@contextmanager
def pending(bench: Bench, count: int) -> Iterator[Pending]:
    """Yield a Redis with *count* waiting messages."""
    with bench.redis() as redis, ExitStack() as stack:
        options = {"native_delay": True}
        client = stack.enter_context(kombu.Connection(redis.url, transport_options=options))
        channel = client.default_channel
        delays, connection = channel.delays, channel.pool.make_connection()
        rounds = Rounds(connection, delays.keys)
        stack.callback(rounds.close)
        rounds.connect()
        one = Pending(count, redis, delays.own, rounds)
        before = used_bytes(redis)
        begin_us = one.store.now_us() + FAR_US
        for first in range(0, count, WINDOW):
            numbers = range(first, min(first + WINDOW, count))
            one.add_all("pending", numbers, lambda number: begin_us + number)
        one.bytes_each = (used_bytes(redis) - before) / count - len(ENVELOPE)
        yield one


ENTRY = entry_of(Destination((QUEUE,)), ENVELOPE)


def row_of(name: str, number: int, due_us: int) -> Row:
    """Return a row whose id is as long as a real one: a UUID, a colon and 12 characters."""
    member = f"{name[-20:]:_>24}{number:012}:{number % 10**12:012}"
    return Row(member, member, due_us, ENTRY)


def used_bytes(redis: PrivateRedis) -> int:
    return int(redis.client.info("memory")["used_memory"])


def draw(result: Result) -> Figure:
    picture, panels = figure("Redis: adding and moving messages", height=4.6, rows=2)
    titles = {
        "add": ("microseconds", "time to add one message (median; the line: p25 to p75)"),
        "promote": ("messages per second", f"due messages moved, {BATCH} per batch"),
    }
    for axes, (kind, (unit, title)) in zip(panels, titles.items(), strict=True):
        axes.set_title(title, fontsize=10, loc="left")
        of_kind = [each for each in result.series.items() if each[0].startswith(kind)]
        bars_on(axes, unit, [(label, p50, (p25, p75), True) for label, (p25, p50, p75) in of_kind])
    return picture
