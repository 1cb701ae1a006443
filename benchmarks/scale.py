"""Measure brokers in which 1 or 10 million tasks wait: memory, disk, restart and lateness."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from matplotlib.figure import Figure

from benchmarks.apps import TASK, lateness_ms, make_app, running_worker, send_all
from benchmarks.charts import quartile_bars
from benchmarks.measuring import (
    BROKER_OPTIONS,
    Bench,
    Result,
    Target,
    log,
    median,
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


class Scale:
    """The scenario for one number of waiting tasks on each broker."""

    def __init__(self, *cases: tuple[str, int]) -> None:
        self._cases = cases

    def run(self, bench: Bench) -> Result:
        most = max(bench.count(count, at_least=1_000) for _, count in self._cases)
        result = Result(
            f"Brokers in which {most:,} tasks wait",
            f"Each broker runs alone. One process sends the tasks with bulk(app); their due times "
            f"are random within {timedelta(seconds=LATEST_SECONDS).days} days. Memory: the growth "
            f"of the broker's resident memory. Disk: its data folder. Start: from a start after a "
            f"clean stop to the first answer. Late: from the due time to the start of a task in a "
            f"prefork worker with two processes, for {bench.count(FLOW, at_least=50):,} tasks at "
            f"{FLOW_PER_SECOND} per second with delays of {FLOW_SECONDS[0]:g} to "
            f"{FLOW_SECONDS[1]:g} s; with no waiting tasks, with all, and with all after the "
            f"restart.",
        )
        for name, count in self._cases:
            if name != "redis" and not find_rabbitmq(name):
                log(f"RabbitMQ {name} is not installed: not measured")
                continue
            measure(bench, name, bench.count(count, at_least=1_000), result)
        return result

    def draw(self, result: Result) -> Figure:
        title = "Lateness of a task while many tasks wait"
        return quartile_bars(
            title, "milliseconds", result.series, lambda label: STAGES[0] not in label
        )


MILLION = Scale(("4.3", 1_000_000), ("3.10", 1_000_000), ("redis", 1_000_000))
TEN_MILLION = Scale(("4.3", 10_000_000), ("redis", 10_000_000))


def measure(bench: Bench, name: str, count: int, result: Result) -> None:
    """Measure one broker in which *count* tasks wait."""
    with _broker(bench, name) as broker:
        is_redis = isinstance(broker, PrivateRedis)
        label = str(broker.installation) if is_redis else f"RabbitMQ {broker.version}"
        url = broker.url if isinstance(broker, PrivateRedis) else broker.new_vhost()
        app = make_app("ours", url)
        what, late = f"scale, {label}, {count:,}", {}
        late[STAGES[0]] = flow(bench, app, url, f"{what}: side flow {STAGES[0]}")
        log(f"{what}: publish")
        before, started = resident_bytes(broker.pid), monotonic()
        fill(app, count)
        publish_seconds = monotonic() - started
        sleep(SETTLE_SECONDS)
        memory_bytes, disk_bytes = resident_bytes(broker.pid) - before, _folder_bytes(broker)
        late[STAGES[1]] = flow(bench, app, url, f"{what}: side flow {STAGES[1]}")
        app.close()
        broker.stop()
        started = monotonic()
        broker.start(within_seconds=BOOT_SECONDS)
        start_seconds = monotonic() - started
        app = make_app("ours", url)
        late[STAGES[2]] = flow(bench, app, url, f"{what}: side flow {STAGES[2]}")
        app.close()
    result.rows.append(
        {
            "broker": label,
            "pending": count,
            "sent/s": count / publish_seconds,
            "memory MB": memory_bytes / MB,
            "disk MB": disk_bytes / MB,
            "start s": start_seconds,
            **{
                f"p50 / p99 ms late {stage}": f"{median(each):.0f} / {percentile(each, 99):.0f}"
                for stage, each in late.items()
            },
            "not started": len(late) * bench.count(FLOW, at_least=50)
            - sum(map(len, late.values())),
        }
    )
    for stage, each in late.items():
        result.series[f"{label}, {count:,}: {stage}"] = quartiles(each)
    if count > 1_000_000:
        empty, full = (median(late[stage]) for stage in STAGES[:2])
        what = f"{label}, median late: {count:,} : none"
        result.targets.append(Target(what, full / empty, "≤", 1.5))


def _broker(bench: Bench, name: str) -> AbstractContextManager[Broker]:
    if name == "redis":
        return bench.redis()
    config = BROKER_OPTIONS["config"] + "\nvm_memory_high_watermark.absolute = 16GB"
    return private_rabbitmq(version=name, **BROKER_OPTIONS | {"config": config})


def fill(app: Any, count: int) -> None:
    """Send *count* delayed tasks with ``bulk(app)``."""
    choose = random.Random(11).uniform
    with bulk(app, timeout_seconds=None) as batch:
        for number in range(count):
            batch.send(TASK, (number,), countdown=choose(SOONEST_SECONDS, LATEST_SECONDS))


def flow(bench: Bench, app: Any, url: str, what: str) -> list[float]:
    """Run a steady load of tasks on a worker, and return each task's lateness in milliseconds."""
    count, chosen = bench.count(FLOW, at_least=50), random.Random(12)
    countdowns = [chosen.uniform(*FLOW_SECONDS) for _ in range(count)]
    with running_worker("ours", url, bench.folder) as worker:
        send_all(app, TASK, [count], countdown=0.5)  # it makes the connection
        return lateness_ms(
            bench,
            app,
            worker,
            countdowns,
            what,
            per_second=FLOW_PER_SECOND,
            sent_before=1,
            grace_seconds=GRACE_SECONDS,
        )


def _folder_bytes(broker: Broker) -> int:
    folder = broker.folder if isinstance(broker, PrivateRedis) else broker.data_dir
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
