"""Measure SQLite as a delay store (a database in which messages wait).

The scenario measures adding messages, moving due messages to the broker, and the lateness of tasks
on a folder broker.
"""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic_ns, perf_counter, time_ns
from typing import Any

import kombu
from kombu import Connection
from matplotlib.figure import Figure
from sqlalchemy import insert

from benchmarks.charts import quartile_bars
from benchmarks.lateness import starts_on
from benchmarks.measuring import (
    Bench,
    Result,
    Target,
    lateness_columns,
    median,
    quartiles,
    quiet,
)
from celery_native_delay.transports.sql.handover import HandOver, hand_over_on
from celery_native_delay.transports.sql.rows import BATCH
from celery_native_delay.transports.sql.schema import MESSAGES
from celery_native_delay.transports.sql.store import Store
from example_project.folder_broker import SCHEME, settings_of

PENDING = 100_000
ROUNDS = 40
BLOCK = 200
"""The number of consecutive adds of one variant."""
DISPATCHED = 1_000
"""The number of due messages that one round moves to the broker."""
TASKS = 1_000
FAR_US = 3_600_000_000

QUEUE = "bench"
ENVELOPE = json.dumps(
    {
        "body": "e" * 400,
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"task": "bench", "id": "e" * 36, "native_delay": {"v": 1, "due": 1}},
        "properties": {
            "delivery_tag": "e" * 36,
            "delivery_info": {"exchange": "", "routing_key": QUEUE},
        },
    }
)
"""An envelope (encoded message) about as long as the message of a task with one argument."""

MODES = ("normal", "full")
TABLE, FILES = "into the broker's tables", "into files"


def run(bench: Bench) -> Result:
    pending = bench.count(PENDING, at_least=500)
    rounds = bench.count(ROUNDS, at_least=3)
    added: dict[str, list[float]] = {mode: [] for mode in MODES}
    dispatched: dict[tuple[str, str], list[float]] = {}
    order = random.Random(6)
    # Measure one mode after the other: a sync in mode FULL would wait for the writes in mode
    # NORMAL.
    for mode in MODES:
        store = filled(bench, mode, pending)
        with quiet(), bench.progress(f"store: add and dispatch, {mode}", rounds) as done:
            for number in range(rounds):
                gc.collect()
                added[mode].append(add_rate(store))
                for place in order.sample((TABLE, FILES), 2):
                    with destination(bench, store, place) as hand_over:
                        rates = dispatched.setdefault((mode, place), [])
                        rates.append(dispatch_rate(store, hand_over))
                done(number + 1)
        store.engine.dispose()
    late_ms = lateness(bench)
    result = Result(
        "Timeout store: SQLite",
        f"Medians of {rounds} rounds with {pending:,} waiting messages. Add: one message of "
        f"{len(ENVELOPE)} bytes per transaction, {BLOCK} in a row. Dispatch: {DISPATCHED} due "
        f"messages in batches of {BATCH}, by one dispatcher, into the tables of kombu's sqlalchemy "
        f"transport in the same database, or into files of its filesystem transport. Lateness: "
        f"{len(late_ms):,} tasks with random delays of 2-6 s on a filesystem broker with "
        f"polling_interval 0.05. A prefork worker with two processes dispatches and runs them.",
        rows=[
            {
                "synchronous": mode.upper(),
                "added/s": median(added[mode]),
                f"dispatched/s, {TABLE}": median(dispatched[mode, TABLE]),
                f"dispatched/s, {FILES}": median(dispatched[mode, FILES]),
            }
            for mode in MODES
        ],
        targets=[
            Target("added in a second, NORMAL", median(added["normal"]), "≥", 5_000, "messages"),
            *(
                Target(
                    f"dispatched in a second, {place}, NORMAL",
                    median(dispatched["normal", place]),
                    "≥",
                    5_000,
                    "messages",
                )
                for place in (TABLE, FILES)
            ),
            Target("p50, due to start of the task", median(late_ms), "≤", 150, "ms"),
        ],
    )
    shown = ", ".join(f"{name} {value:.0f}" for name, value in lateness_columns(late_ms).items())
    result.notes.append(
        "Each round has a new folder: on ext4, creating files is ten times slower for five seconds "
        "after many files of the folder were removed, also with kombu alone."
    )
    result.notes.append(f"Lateness on the filesystem broker: {shown}.")
    rates = {f"add, {mode.upper()}": added[mode] for mode in MODES}
    rates |= {
        f"dispatch {place}, {mode.upper()}": dispatched[mode, place] for mode, place in dispatched
    }
    for label, values in sorted(rates.items()):
        result.series[label] = quartiles(values)
    return result


def filled(bench: Bench, mode: str, count: int) -> Store:
    store = Store(f"sqlite:///{bench.folder}/store-{mode}.db?synchronous={mode}", "celery_delay")
    fill(store, count, time_ns() // 1000 + FAR_US)
    return store


def fill(store: Store, count: int, first_us: int) -> None:
    store.prepare()
    rows = [
        {
            "namespace": store.namespace,
            "due_us": first_us + number,
            "queue": QUEUE,
            "envelope": ENVELOPE,
            "task_id": f"{random.getrandbits(128):036x}",
        }
        for number in range(count)
    ]
    with store.engine.begin() as connection:
        connection.execute(insert(MESSAGES), rows)


def add_rate(store: Store) -> float:
    """Return the rate of adding a few messages that are due after all other messages."""
    ids = [f"{random.getrandbits(128):036x}" for _ in range(BLOCK)]
    due_us = time_ns() // 1000 + 2 * FAR_US
    started = perf_counter()
    for task_id in ids:
        store.add(QUEUE, ENVELOPE, due_us=due_us, task_id=task_id)
    return BLOCK / (perf_counter() - started)


def dispatch_rate(store: Store, hand_over: HandOver) -> float:
    fill(store, DISPATCHED, time_ns() // 1000 - 1_000_000)
    count = 0
    started = perf_counter()
    while count < DISPATCHED:
        with store.taking(until_us=time_ns() // 1000) as batch:
            assert hand_over(batch, park=False) is None
        count += len(batch.delivered)
    return count / (perf_counter() - started)


@contextmanager
def destination(bench: Bench, store: Store, place: str) -> Iterator[HandOver]:
    """Yield a function that moves due messages to the broker, into an empty queue."""
    if place == TABLE:
        with Connection(f"sqla+{store.url.partition('?')[0]}") as connection:
            channel = connection.default_channel
            yield hand_over_on(channel, store)
            channel._purge(QUEUE)
            channel.session.close()
        return
    # Use a new folder each time: in an emptied folder, ext4 creates files ten times as slowly for
    # five seconds.
    with folder_broker(bench.folder / f"folder-{monotonic_ns()}") as connection:
        yield hand_over_on(connection.default_channel, store)


def folder_broker(folder: Path) -> Any:
    options = settings_of(f"{SCHEME}{folder}")["broker_transport_options"]
    return kombu.Connection(f"{SCHEME}{folder}", transport_options=options)


def lateness(bench: Bench) -> list[float]:
    """Return the lateness of each task's start in milliseconds."""
    chosen = random.Random(7)
    count = bench.count(TASKS, at_least=20)
    delays = [round(chosen.uniform(2, 6), 3) for _ in range(count)]
    return starts_on(f"{SCHEME}{bench.folder}/late", bench, "ours", delays, "store, lateness")


def draw(result: Result) -> Figure:
    title = "Messages per second, with 100,000 in SQLite"
    return quartile_bars(title, "messages per second", result.series)
