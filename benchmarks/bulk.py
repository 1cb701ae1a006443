"""Measure sending many delayed tasks: in a loop, and by ``bulk(app)``."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import perf_counter, process_time, time, time_ns
from typing import Any

import amqp
import kombu
from celery.signals import before_task_publish
from matplotlib.figure import Figure

from benchmarks.apps import QUEUE, TASK, declare_for, make_app
from benchmarks.charts import quartile_bars
from benchmarks.measuring import REDIS_CONFIG, Bench, Result, Target, median, quartiles
from celery_native_delay import delay_headers
from celery_native_delay.bulk import bulk
from celery_native_delay.due_time import due_us as due_us_of
from celery_native_delay.testing import private_redis
from celery_native_delay.transports.rabbitmq.channels import Publication, WindowChannel
from example_project.folder_broker import SCHEME

ROUNDS = 10
LOOP = 1_000
"""The number of consecutive tasks of one variant that calls apply_async() in a loop."""
MANY = 10_000
"""The number of consecutive tasks of one variant that uses ``bulk(app)``."""
WINDOW = 1_000
COUNTDOWN_SECONDS = 600


@dataclass
class Variant:
    """One way to send many tasks, with the measured seconds per task of each round."""

    label: str
    count: int
    send: Callable[[int], object]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def measure(self) -> None:
        cpu, started = process_time(), perf_counter()
        self.send(self.count)
        self.seconds.append((perf_counter() - started) / self.count)
        self.cpu_seconds.append((process_time() - cpu) / self.count)


def run(bench: Bench) -> Result:
    rounds = bench.count(ROUNDS, at_least=2)
    loop, many = bench.count(LOOP, at_least=50), bench.count(MANY, at_least=200)
    with ExitStack() as stack:

        def app_with(**settings: Any) -> Any:
            app = make_app("ours", stack.enter_context(bench.vhost()), **settings)
            stack.callback(app.close)
            declare_for("ours", app)
            return app

        def redis_app() -> Any:
            app = make_app("ours", stack.enter_context(private_redis(config=REDIS_CONFIG)).url)
            stack.callback(app.close)
            return app

        def folder_app() -> Any:
            app = make_app("ours", f"{SCHEME}{bench.folder}/bulk")
            stack.callback(app.close)
            return app

        ways = {
            "wait": Variant("apply_async loop, each waits", loop, _loop(app_with())),
            "bulk": Variant("bulk(app)", many, _bulk(app_with())),
            "seen": Variant("bulk(app), tasks are seen", loop, _seen(app_with())),
            "template": Variant("its template path alone", many, _template(app_with())),
            "bare": Variant("bare py-amqp, same window", many, _bare(app_with(), stack)),
            "redis loop": Variant("Redis, apply_async loop", loop, _loop(redis_app())),
            "redis bulk": Variant("Redis, bulk(app)", many, _bulk(redis_app())),
            "store loop": Variant("SQLite, apply_async loop", loop, _loop(folder_app())),
            "store bulk": Variant("SQLite, bulk(app)", many, _bulk(folder_app())),
        }
        order = random.Random(1)
        with bench.progress("bulk", rounds) as done:
            for number in range(rounds):
                for way in order.sample(list(ways.values()), len(ways)):
                    way.measure()
                done(number + 1)
    return conclude(ways, rounds)


def _loop(app: Any) -> Callable[[int], None]:
    send_one = app.tasks[TASK]

    def send(count: int) -> None:
        for index in range(count):
            send_one.apply_async((index,), countdown=COUNTDOWN_SECONDS)

    send(50)
    return send


def _bulk(app: Any) -> Callable[[int], None]:
    def send(count: int) -> None:
        with bulk(app, window=WINDOW) as batch:
            for index in range(count):
                batch.send(TASK, (index,), countdown=COUNTDOWN_SECONDS)

    send(50)
    return send


def _seen(app: Any) -> Callable[[int], None]:
    """Return a function that uses bulk() with a signal receiver, as Sentry has one.

    With a receiver, each task goes through apply_async().
    """
    send = _bulk(app)

    def watch(**_: Any) -> None:
        pass

    def send_seen(count: int) -> None:
        before_task_publish.connect(watch)
        try:
            send(count)
        finally:
            before_task_publish.disconnect(watch)

    return send_seen


def _template(app: Any) -> Callable[[int], None]:
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

    send(50)
    return send


def _bare(app: Any, stack: ExitStack) -> Callable[[int], None]:
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

    send(50)
    return send


def conclude(ways: dict[str, Variant], rounds: int) -> Result:
    result = Result(
        "Many delayed tasks at once",
        f"{rounds} rounds; in each round every variant sends its tasks, in random order. A variant "
        f"ends when the broker has confirmed its last task. The "
        f"window is {WINDOW:,} publishes. CPU is the client's. The template path alone gets ids, "
        f"reprs and body ready-made; bulk(app) makes them. Bare py-amqp sends one task's message "
        f"repeatedly. Brokers and client share the machine's processors. Redis has an append-only "
        f"file; the filesystem broker has a store in SQLite.",
    )
    for way in ways.values():
        rates = quartiles(1 / seconds for seconds in way.seconds)
        result.rows.append(
            {
                "variant": way.label,
                "tasks/s": 1 / median(way.seconds),
                "p25": rates[0],
                "p75": rates[2],
                "CPU µs/task": median(way.cpu_seconds) * 1e6,
            }
        )
        result.series[way.label] = rates
    rate = {key: 1 / median(way.seconds) for key, way in ways.items()}
    result.targets += [
        Target("bulk(app) : bare py-amqp", rate["bulk"] / rate["bare"], "≥", 0.9),
        Target(
            "template path, client CPU", median(ways["template"].cpu_seconds) * 1e6, "≤", 10, "µs"
        ),
        Target("Redis: bulk(app) : loop", rate["redis bulk"] / rate["redis loop"], "≥", 6),
        Target("SQLite store: bulk(app) : loop", rate["store bulk"] / rate["store loop"], "≥", 5),
    ]
    return result


def draw(result: Result) -> Figure:
    title, unit = "Publishing many delayed tasks", "tasks per second"
    return quartile_bars(title, unit, result.series, lambda label: "bulk" in label)
