"""Measure stores beside RabbitMQ: publishing into them, dispatching due tasks, and lateness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial
from time import perf_counter, sleep, time
from typing import Any

from celery import Celery
from kombu import Consumer
from matplotlib.figure import Figure

from benchmarks.apps import QUEUE, TASK, running, sending
from benchmarks.charts import quartile_bars
from benchmarks.measuring import (
    Bench,
    Calls,
    Result,
    Target,
    alternating_calls,
    median,
    percentile,
    percentile_columns,
    quartiles,
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
    rounds = bench.count(ROUNDS, at_least=3)
    with ExitStack() as stack:
        redis = stack.enter_context(bench.redis())
        postgresql = stack.enter_context(private_postgresql())
        stores = {
            "Redis": redis.url,
            "PostgreSQL": postgresql.new_database(),
            "SQLite": f"sqlite:///{bench.folder}/store.db",
        }
        published = publishes(bench, stores, rounds)
        dispatched = {place: dispatch_rates(bench, url) for place, url in stores.items()}
        late = {place: lateness(bench, stores[place]) for place in ("Redis", "PostgreSQL")}
    result = Result(
        "Stores beside RabbitMQ",
        f"Publish: apply_async() with a confirm each, {BLOCK} in a row, alternating, "
        f"{rounds} rounds. Dispatch: one dispatcher publishes "
        f"{DISPATCHED:,} due tasks from the store to a quorum queue, with confirms. Lateness: "
        f"{PER_SECOND:,} tasks become due in a second; from the due time until a consumer has the "
        f"message, with one `delay promote`.",
    )
    for way, calls in published.items():
        what, each = f"apply_async: {way}", calls.seconds
        columns = percentile_columns(each, "ms")
        result.rows.append({"what": what, "per s": 1 / calls.median, **columns})
        result.series[way] = quartiles(1 / seconds for seconds in each)
    for place, rates in dispatched.items():
        what = f"dispatch from {place}"
        result.rows.append({"what": what, "per s": median(rates), **dict.fromkeys(columns, "")})
        result.series[what] = quartiles(rates)
    for place, limit in (("Redis", 1.0), ("PostgreSQL", 1.6)):
        ratio = published[place].median / published[IMMEDIATE].median
        what = f"publish, {place} : not delayed (medians)"
        result.targets.append(Target(what, ratio, "≤", limit))
    for place in late:
        rate = median(dispatched[place])
        result.targets.append(Target(f"dispatch from {place}", rate, "≥", 3_000, "tasks/s"))
    for place, seconds in late.items():
        what, p99_ms = f"lateness, {place}", percentile(seconds, 99) * 1e3
        row = {"what": what, "per s": PER_SECOND, **percentile_columns(seconds, "ms")}
        result.rows.append(row)
        result.targets.append(Target(f"{what}, p99", p99_ms, "≤", 250, "ms"))
    return result


@contextmanager
def an_app(bench: Bench, **settings: Any) -> Iterator[Celery]:
    """An app on a virtual host of its own, whose publishes are confirmed."""
    with bench.vhost() as vhost, sending("ours", vhost, confirm=True, **settings) as app:
        yield app


def publishes(bench: Bench, stores: dict[str, str], rounds: int) -> dict[str, Calls]:
    """Measure each publish, by where the task waits."""
    with ExitStack() as stack:
        broker = stack.enter_context(an_app(bench))
        apps = {place: stack.enter_context(an_app(bench, store=at)) for place, at in stores.items()}

        def sender(app: Celery, countdown: int | None = FAR_SECONDS) -> Any:
            send = partial(app.tasks[TASK].apply_async, countdown=countdown)
            return lambda index: send((index,))

        ways = {IMMEDIATE: sender(broker, None), BROKER: sender(broker)}
        ways |= {place: sender(app) for place, app in apps.items()}
        return alternating_calls("store, publish", rounds, ways, BLOCK)


def dispatch_rates(bench: Bench, url: str) -> list[float]:
    """Return the rate of each round in which one dispatcher publishes due tasks to RabbitMQ."""
    rounds, rates = bench.count(10, at_least=2), []
    count = bench.count(DISPATCHED, at_least=200)
    with an_app(bench, store=url) as app, app.connection_for_write() as connection:
        channel = connection.default_channel
        dispatcher = Dispatcher(
            channel.needed_store, lambda: channel.publisher_of(app.connection_for_write())
        )
        for _ in range(rounds):
            with bulk(app) as batch:
                for index in range(count):
                    batch.send(TASK, (index,), countdown=2)
            sleep(2.1)  # they are all due
            started = perf_counter()
            assert dispatcher.publish_due() >= count
            rates.append(count / (perf_counter() - started))
        dispatcher._disconnect()
    return rates


def lateness(bench: Bench, url: str) -> list[float]:
    """Return the seconds from the due time of each task until a consumer has its message."""
    count = bench.count(LATE_TASKS, at_least=200)
    late: list[float] = []

    def came(message: Any) -> None:
        late.append(time() - datetime.fromisoformat(message.headers["eta"]).timestamp())
        message.ack()

    with an_app(bench, store=url) as app:
        conf = {"native_delay_store": url}
        with running("ours", str(app.conf.broker_url), conf, "delay", "promote") as promoter:
            promoter.stdout.readline()
            app.tasks[TASK].apply_async((-1,), countdown=1)  # the promoter connects to RabbitMQ
            with bulk(app) as batch:
                for index in range(count):
                    batch.send(TASK, (index,), countdown=5 + index / PER_SECOND)
            with app.connection_for_read() as connection:
                queue = app.amqp.queues[QUEUE](connection.default_channel)
                consumer = Consumer(connection, [queue], on_message=came, prefetch_count=500)
                with consumer:
                    while len(late) < count + 1:
                        connection.drain_events(timeout=60)
    return late[1:]


def draw(result: Result) -> Figure:
    return quartile_bars("Stores beside RabbitMQ", "tasks per second", result.series)
