"""Measure brokers in which 1 or 10 million tasks wait: memory, disk, restart and lateness."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from matplotlib.figure import Figure

from benchmarks.apps import TASK, make_app, running_worker
from benchmarks.charts import quartile_bars
from benchmarks.measuring import (
    BROKER_OPTIONS,
    Bench,
    Result,
    Target,
    log,
    percentile,
    quartiles,
    resident_bytes,
)
from celery_native_delay.bulk import bulk
from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis
from tests.rabbitmqs import find_rabbitmq, private_rabbitmq

SOONEST_SECONDS, LATEST_SECONDS = 6 * 3600, 30 * 86_400
"""The range of the waiting tasks' delays."""

FLOW = 1_000
FLOW_PER_SECOND = 100
FLOW_SECONDS = 1.0, 4.0
"""The range of delays of other tasks that become due during the measurement."""

GRACE_SECONDS = 60
SETTLE_SECONDS = 10
BOOT_SECONDS = 1_800

MB = 1_000_000

STAGES = ("with none pending", "with all pending", "after a restart")

Broker = PrivateRabbitMQ | PrivateRedis


@dataclass
class Measured:
    """The measurements of one broker in which many tasks wait."""

    label: str
    pending: int
    publish_seconds: float = 0.0
    resident_bytes: int = 0
    """The growth of the broker's resident memory."""
    disk_bytes: int = 0
    """The size of the broker's data folder."""
    start_seconds: float = 0.0
    """Seconds from a start with all waiting tasks to the broker's first answer."""
    late_ms: dict[str, list[float]] = field(default_factory=dict)
    """The lateness of the other tasks that became due during the measurement, by stage."""
    missing: int = 0
    """The number of these other tasks without a recorded start."""


class Scale:
    """The scenario for one number of waiting tasks on each broker."""

    def __init__(self, *cases: tuple[str, int]) -> None:
        self._cases = cases

    def run(self, bench: Bench) -> Result:
        measured = []
        for name, count in self._cases:
            if name != "redis" and not find_rabbitmq(name):
                log(f"RabbitMQ {name} is not installed: not measured")
                continue
            measured.append(measure(bench, name, bench.count(count, at_least=1_000)))
        return conclude(bench, measured)

    def draw(self, result: Result) -> Figure:
        title = "Lateness of a task while many tasks wait"
        return quartile_bars(
            title, "milliseconds", result.series, lambda label: STAGES[0] not in label
        )


MILLION = Scale(("4.3", 1_000_000), ("3.10", 1_000_000), ("redis", 1_000_000))
TEN_MILLION = Scale(("4.3", 10_000_000), ("redis", 10_000_000))


def measure(bench: Bench, name: str, count: int) -> Measured:
    with _broker(bench, name) as broker:
        is_redis = isinstance(broker, PrivateRedis)
        label = str(broker.installation) if is_redis else f"RabbitMQ {broker.version}"
        url = broker.url if isinstance(broker, PrivateRedis) else broker.new_vhost()
        found = Measured(label, count)
        app = make_app("ours", url)
        what = f"scale, {label}, {count:,}"

        def flow_of(stage: str) -> None:
            late_ms, missing = flow(bench, app, url, f"{what}: side flow {stage}")
            found.late_ms[stage] = late_ms
            found.missing += missing

        flow_of(STAGES[0])
        before = _resident(broker)
        started = monotonic()
        fill(bench, app, count, f"{what}: publish")
        found.publish_seconds = monotonic() - started
        sleep(SETTLE_SECONDS)
        found.resident_bytes = _resident(broker) - before
        found.disk_bytes = _folder_bytes(_data(broker))
        flow_of(STAGES[1])
        app.close()
        broker.stop()
        started = monotonic()
        broker.start(within_seconds=BOOT_SECONDS)
        found.start_seconds = monotonic() - started
        app = make_app("ours", url)
        flow_of(STAGES[2])
        app.close()
    return found


def _broker(bench: Bench, name: str) -> AbstractContextManager[Broker]:
    if name == "redis":
        return bench.redis()
    config = BROKER_OPTIONS["config"] + "\nvm_memory_high_watermark.absolute = 16GB"
    return private_rabbitmq(version=name, **BROKER_OPTIONS | {"config": config})


def fill(bench: Bench, app: Any, count: int, what: str) -> None:
    """Send *count* delayed tasks with ``bulk(app)``."""
    choose = random.Random(11).uniform
    with bench.progress(what, count) as done, bulk(app, timeout_seconds=None) as batch:
        for number in range(count):
            countdown = choose(SOONEST_SECONDS, LATEST_SECONDS)
            batch.send(TASK, (number,), countdown=countdown)
            if not number % 1000:
                done(number)


def flow(bench: Bench, app: Any, url: str, what: str) -> tuple[list[float], int]:
    """Run a steady load of tasks on a worker.

    Returns:
        Each task's lateness in milliseconds, and the number of tasks that did not start.
    """
    count = bench.count(FLOW, at_least=50)
    choose, due = random.Random(12).uniform, []
    send = app.tasks[TASK].apply_async
    with running_worker("ours", url, bench.folder) as worker:
        send((count,), countdown=0.5)  # the first one makes the connection
        started = time()
        with bench.progress(what, count) as done:
            for number in range(count):
                sleep(max(0.0, started + number / FLOW_PER_SECOND - time()))
                due.append(time() + choose(*FLOW_SECONDS))
                send((number,), eta=datetime.fromtimestamp(due[-1], UTC))
                done(number)
        bench.wait_for(what, worker.start_count, count + 1, timeout_seconds=GRACE_SECONDS)
        starts = worker.starts()
    late = {number: (at - due[number]) * 1000 for number, at in starts if number < count}
    return list(late.values()), count - len(late)


def conclude(bench: Bench, measured: list[Measured]) -> Result:
    count = bench.count(FLOW, at_least=50)
    result = Result(
        f"Brokers in which {max((one.pending for one in measured), default=0):,} tasks wait",
        f"Each broker runs alone. One process sends the tasks with bulk(app); their due times are "
        f"random within {timedelta(seconds=LATEST_SECONDS).days} days. Memory: the growth of the "
        f"broker's resident memory. Disk: its data folder. Start: from a start after a clean stop "
        f"to the first answer. Late: from the due time to the start of a task in a prefork worker "
        f"with two processes, for {count:,} tasks at {FLOW_PER_SECOND} per second with delays of "
        f"{FLOW_SECONDS[0]:g} to {FLOW_SECONDS[1]:g} s; with no waiting tasks, with all, and with "
        f"all after the restart.",
    )
    for one in measured:
        result.rows.append(
            {
                "broker": one.label,
                "pending": one.pending,
                "sent/s": one.pending / one.publish_seconds,
                "memory MB": one.resident_bytes / MB,
                "disk MB": one.disk_bytes / MB,
                "start s": one.start_seconds,
                **{
                    f"p50 / p99 ms late {stage}": f"{percentile(late, 50):.0f} / "
                    f"{percentile(late, 99):.0f}"
                    for stage, late in one.late_ms.items()
                },
                "not started": one.missing,
            }
        )
        for stage, late in one.late_ms.items():
            result.series[f"{one.label}, {one.pending:,}: {stage}"] = quartiles(late)
        empty, full = (percentile(one.late_ms[stage], 50) for stage in STAGES[:2])
        if one.pending > 1_000_000:
            what = f"{one.label}, median late: {one.pending:,} : none"
            result.targets.append(Target(what, full / empty, "≤", 1.5))
    return result


def _resident(broker: Broker) -> int:
    assert broker.pid is not None
    return resident_bytes(broker.pid)


def _data(broker: Broker) -> Path:
    return broker.folder if isinstance(broker, PrivateRedis) else broker.data_dir


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
