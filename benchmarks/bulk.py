"""Measure sending many delayed tasks: in a loop, and by ``bulk(app)``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from time import time, time_ns
from typing import Any

import amqp
import kombu
from celery.signals import before_task_publish
from matplotlib.figure import Figure

from benchmarks.apps import QUEUE, TASK, sending
from benchmarks.charts import quartile_bars
from benchmarks.measuring import Bench, Result, Target, alternate, block_of, median, quartiles
from celery_native_delay import delay_headers
from celery_native_delay.bulk import bulk
from celery_native_delay.due_time import due_us as due_us_of
from celery_native_delay.transports.rabbitmq.channels import Publication, WindowChannel
from example_project.folder_broker import SCHEME

ROUNDS = 10
LOOP = 1_000
"""The number of consecutive tasks of one variant that calls apply_async() in a loop."""
MANY = 10_000
"""The number of consecutive tasks of one variant that uses ``bulk(app)``."""
WINDOW = 1_000
COUNTDOWN_SECONDS = 600

WAITS, BULK = "apply_async loop, each waits", "bulk(app)"
TEMPLATE, BARE = "its template path alone", "bare py-amqp, same window"


#: A function that sends as many tasks as its argument says.
Send = Callable[[int], object]


def run(bench: Bench) -> Result:
    rounds = bench.count(ROUNDS, at_least=2)
    loop, many = bench.count(LOOP, at_least=50), bench.count(MANY, at_least=200)
    with ExitStack() as stack:

        def app_at(url: str | None = None) -> Any:
            return stack.enter_context(sending("ours", url or stack.enter_context(bench.vhost())))

        redis = stack.enter_context(bench.redis()).url
        folder = f"{SCHEME}{bench.folder}/bulk"
        sends: dict[str, tuple[int, Send]] = {
            WAITS: (loop, partial(_loop, app_at())),
            BULK: (many, partial(_bulk, app_at())),
            "bulk(app), tasks are seen": (loop, partial(_seen, app_at())),
            TEMPLATE: (many, _template(app_at())),
            BARE: (many, _bare(app_at(), stack)),
            "Redis, apply_async loop": (loop, partial(_loop, app_at(redis))),
            "Redis, bulk(app)": (many, partial(_bulk, app_at(redis))),
            "SQLite, apply_async loop": (loop, partial(_loop, app_at(folder))),
            "SQLite, bulk(app)": (many, partial(_bulk, app_at(folder))),
        }
        ways = {way: partial(sent, send, count) for way, (count, send) in sends.items()}
        found = alternate("bulk", rounds, ways)
    result = Result(
        "Many delayed tasks at once",
        f"{rounds} rounds; in each round every variant sends its tasks, in random order. A variant "
        f"ends when the broker has confirmed its last task. The "
        f"window is {WINDOW:,} publishes. CPU is the client's. The template path alone gets ids, "
        f"reprs and body ready-made; bulk(app) makes them. Bare py-amqp sends one task's message "
        f"repeatedly. Brokers and client share the machine's processors. Redis has an append-only "
        f"file; the filesystem broker has a store in SQLite.",
    )
    rate: dict[str, float] = {}
    for way, rounds_of_way in found.items():
        low, rate[way], high = result.series[way] = quartiles(rate for rate, _ in rounds_of_way)
        cpu_us = median(cpu for _, cpu in rounds_of_way) * 1e6
        row = {"variant": way, "tasks/s": rate[way], "p25": low, "p75": high}
        result.rows.append(row | {"CPU µs/task": cpu_us})
        if way == TEMPLATE:
            result.targets.append(Target("template path, client CPU", cpu_us, "≤", 10, "µs"))
    result.targets.append(Target("bulk(app) : bare py-amqp", rate[BULK] / rate[BARE], "≥", 0.9))
    for place, limit in (("Redis", 6), ("SQLite", 5)):
        ratio = rate[f"{place}, bulk(app)"] / rate[f"{place}, apply_async loop"]
        result.targets.append(Target(f"{place}: bulk(app) : loop", ratio, "≥", limit))
    return result


def sent(send: Send, count: int) -> tuple[float, float]:
    """Return the tasks per second, and the CPU seconds for one task."""
    block = block_of(lambda _: send(count), 1)
    return count / block.seconds[0], block.cpu_seconds / count


def _loop(app: Any, count: int) -> None:
    task = app.tasks[TASK]
    for index in range(count):
        task.apply_async((index,), countdown=COUNTDOWN_SECONDS)


def _bulk(app: Any, count: int) -> None:
    with bulk(app, window=WINDOW) as batch:
        for index in range(count):
            batch.send(TASK, (index,), countdown=COUNTDOWN_SECONDS)


def _seen(app: Any, count: int) -> None:
    """Use bulk() with a signal receiver, as Sentry has one: each task goes through apply_async."""

    def watch(**_: Any) -> None:
        pass

    before_task_publish.connect(watch)
    try:
        _bulk(app, count)
    finally:
        before_task_publish.disconnect(watch)


def _template(app: Any) -> Send:
    """Return a function that only sends by template (an encoded task message) with ``bulk(app)``.

    Bodies and ids are made before the measurement.
    """
    publisher = app.connection_for_write().transport.bulk_publisher(window=WINDOW)
    task_id, body = "0" * 36, b"[[0], {}, {}]"

    def send(count: int) -> None:
        publisher.publish(
            lambda producer: app.tasks[TASK].apply_async(
                (0,), countdown=COUNTDOWN_SECONDS, producer=producer, retry=False
            )
        )
        kind = publisher.learn()
        assert kind is not None
        eta = datetime.fromtimestamp(time() + COUNTDOWN_SECONDS, UTC)
        due_us, text = due_us_of(eta), eta.isoformat()
        for _ in range(count):
            assert publisher.send(kind, due_us, (task_id, text, "(0,)", "{}", body))
        publisher.outbox.settle(timeout_seconds=60)

    return send


def _bare(app: Any, stack: ExitStack) -> Send:
    """Return a function that publishes one prepared message repeatedly.

    The time is that of py-amqp and the broker alone.
    """
    delays = stack.enter_context(app.connection_for_write()).default_channel.delays
    connection = stack.enter_context(kombu.Connection(app.conf.broker_url))
    connection.connect()
    headers, properties, body, _ = app.amqp.create_task_message(
        "0" * 36, TASK, (0,), {}, countdown=COUNTDOWN_SECONDS
    )
    content_type, content_encoding, text = kombu.serialization.dumps(body, "json")
    message = amqp.Message(
        text,
        application_headers=headers | delay_headers(countdown=COUNTDOWN_SECONDS),
        content_type=content_type,
        content_encoding=content_encoding,
        delivery_mode=2,
        **properties,
    )
    due_us = time_ns() // 1000 + COUNTDOWN_SECONDS * 1_000_000
    publication = delays.into_levels(Publication(message, "", QUEUE), due_us=due_us)

    def send(count: int) -> None:
        channel = WindowChannel(connection.connection)
        for _ in range(count):
            if channel.unsettled_count >= WINDOW:
                channel.read_down_to(WINDOW - 1)
            channel.send(publication)
        channel.read_down_to(0)
        channel.close()

    return send


def draw(result: Result) -> Figure:
    title, unit = "Publishing many delayed tasks", "tasks per second"
    return quartile_bars(title, unit, result.series, lambda label: "bulk" in label)
