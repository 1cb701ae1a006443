"""Measure stores beside RabbitMQ: publishing into them, dispatching due tasks, and lateness."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial
from time import perf_counter, time
from typing import Any

from celery import Celery
from kombu import Consumer
from matplotlib.figure import Figure

from benchmarks.apps import QUEUE, REPOSITORY, TASK, environment_of, sending
from benchmarks.charts import quartile_bars
from benchmarks.measuring import (
    Bench,
    Block,
    Result,
    Target,
    alternate,
    block_of,
    lateness_columns,
    median,
    percentile,
    percentile_columns,
    quartiles,
    seconds_of,
)
from celery_native_delay.bulk import bulk
from celery_native_delay.store.dispatcher import Dispatcher
from tests.postgresql import private_postgresql

ROUNDS = 40
BLOCK = 50
"""The number of consecutive publishes of one variant."""
DISPATCHED = 2_000
"""The number of due tasks that one round publishes to RabbitMQ."""
LATE_TASKS = 20_000
PER_SECOND = 1_000
"""The number of tasks that become due in a second, for lateness."""
FAR_SECONDS = 3_600
BROKER = "RabbitMQ's levels"
IMMEDIATE = "RabbitMQ, not delayed"


def run(bench: Bench) -> Result:
    with ExitStack() as stack:
        redis = stack.enter_context(bench.redis())
        postgresql = stack.enter_context(private_postgresql())
        stores = {
            "Redis": redis.url,
            "PostgreSQL": postgresql.new_database(),
            "SQLite": f"sqlite:///{bench.folder}/store.db",
        }
        published = publishes(bench, stores)
        dispatched = {place: dispatch_rates(bench, url) for place, url in stores.items()}
        late_ms = {place: lateness(bench, stores[place]) for place in ("Redis", "PostgreSQL")}
    rows = [
        {"what": f"apply_async: {way}", "per s": 1 / median(each), **percentile_columns(each, "ms")}
        for way, each in published.items()
    ]
    rows += [
        {"what": f"dispatch from {place}", "per s": median(each), **dict.fromkeys(_COLUMNS, "")}
        for place, each in dispatched.items()
    ]
    rows += [
        {"what": f"lateness, {place}", "per s": PER_SECOND, **_lateness(each)}
        for place, each in late_ms.items()
    ]
    base = median(published[IMMEDIATE])
    result = Result(
        "Stores beside RabbitMQ",
        f"Publish: apply_async() with a confirm each, {BLOCK} in a row, alternating, "
        f"{bench.count(ROUNDS, at_least=3)} rounds. Dispatch: one dispatcher publishes "
        f"{DISPATCHED:,} due tasks from the store to a quorum queue, with confirms. Lateness: "
        f"{PER_SECOND:,} tasks become due in a second; from the due time until a consumer has the "
        f"message, with one `delay promote`.",
        rows,
        [
            *(
                Target(
                    f"publish, {place} : not delayed (medians)",
                    median(published[place]) / base,
                    "≤",
                    limit,
                )
                for place, limit in (("Redis", 1.0), ("PostgreSQL", 1.6))
            ),
            *(
                Target(f"dispatch from {place}", median(dispatched[place]), "≥", 3_000, "tasks/s")
                for place in ("Redis", "PostgreSQL")
            ),
            *(
                Target(f"lateness, {place}, p99", percentile(each, 99), "≤", 250, "ms")
                for place, each in late_ms.items()
            ),
        ],
    )
    result.series = {way: quartiles(1 / each for each in found) for way, found in published.items()}
    result.series |= {
        f"dispatch from {place}": quartiles(found) for place, found in dispatched.items()
    }
    return result


_COLUMNS = ("p50 ms", "p95 ms", "p99 ms")


def _lateness(late_ms: list[float]) -> dict[str, float]:
    found = lateness_columns(late_ms)
    return {name: found[name] for name in _COLUMNS}


@contextmanager
def an_app(bench: Bench, **settings: Any) -> Iterator[Celery]:
    """An app on a virtual host of its own, whose publishes are confirmed."""
    with bench.vhost() as vhost, sending("ours", vhost, confirm=True, **settings) as app:
        yield app


def publishes(bench: Bench, stores: dict[str, str]) -> dict[str, list[float]]:
    """Return the seconds of each publish, by where the task waits."""
    with ExitStack() as stack:
        broker = stack.enter_context(an_app(bench))
        apps = {place: stack.enter_context(an_app(bench, store=at)) for place, at in stores.items()}

        def block(app: Celery, countdown: int | None = FAR_SECONDS) -> Callable[[], Block]:
            send = app.tasks[TASK].apply_async
            return partial(block_of, lambda index: send((index,), countdown=countdown), BLOCK)

        ways = {IMMEDIATE: block(broker, None), BROKER: block(broker)}
        ways |= {place: block(app) for place, app in apps.items()}
        rounds = bench.count(ROUNDS, at_least=3)
        found = alternate(bench, "store, publish", rounds, ways)
    return {way: seconds_of(blocks) for way, blocks in found.items()}


def dispatch_rates(bench: Bench, url: str) -> list[float]:
    """Return the rate of each round in which one dispatcher publishes due tasks to RabbitMQ."""
    rounds, rates = bench.count(10, at_least=2), []
    count = bench.count(DISPATCHED, at_least=200)
    with an_app(bench, store=url) as app, app.connection_for_write() as connection:
        channel = connection.default_channel
        dispatcher = Dispatcher(
            channel.needed_store, lambda: channel.publisher_of(app.connection_for_write())
        )
        with bench.progress(f"store, dispatch from {url.partition(':')[0]}", rounds) as done:
            for number in range(rounds):
                with bulk(app) as batch:
                    for index in range(count):
                        batch.send(TASK, (index,), countdown=2)
                while (dispatcher.next_due_us() or 0) > time() * 1e6 - 2_000_000:
                    pass
                started = perf_counter()
                assert dispatcher.publish_due() >= count
                rates.append(count / (perf_counter() - started))
                done(number + 1)
        dispatcher._disconnect()
    return rates


def lateness(bench: Bench, url: str) -> list[float]:
    """Return the milliseconds from the due time of each task until a consumer has its message."""
    count = bench.count(LATE_TASKS, at_least=200)
    late_ms: list[float] = []

    def came(message: Any) -> None:
        eta = datetime.fromisoformat(message.headers["eta"]).timestamp()
        late_ms.append((time() - eta) * 1000)
        message.ack()

    with an_app(bench, store=url) as app:
        conf = {"native_delay_store": url}
        environment = environment_of("ours", str(app.conf.broker_url), conf)
        command = ["-m", "celery", "-A", "benchmarks.worker_app", "delay", "promote"]
        with subprocess.Popen(
            [sys.executable, *command],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as promoter:
            assert promoter.stdout is not None
            promoter.stdout.readline()
            app.tasks[TASK].apply_async((-1,), countdown=1)  # the promoter connects to RabbitMQ
            with bulk(app) as batch:
                for index in range(count):
                    batch.send(TASK, (index,), countdown=5 + index / PER_SECOND)
            with app.connection_for_read() as connection:
                queue = app.amqp.queues[QUEUE](connection.default_channel)
                consumer = Consumer(connection, [queue], on_message=came, prefetch_count=500)
                with consumer, bench.progress("store, lateness", count) as done:
                    while len(late_ms) < count + 1:
                        connection.drain_events(timeout=60)
                        done(len(late_ms))
            promoter.terminate()
    return late_ms[1:]


def draw(result: Result) -> Figure:
    return quartile_bars("Stores beside RabbitMQ", "tasks per second", result.series)
