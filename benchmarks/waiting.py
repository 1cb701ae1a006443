"""Measure the records (state about waiting tasks): publishing, worker checks, and reading many
tasks.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from resource import RUSAGE_SELF, getrusage
from time import perf_counter, process_time
from typing import Any
from urllib.request import urlopen
from uuid import uuid4

from matplotlib.figure import Figure

from benchmarks.apps import REPOSITORY, TASK, declare_for, make_app
from benchmarks.charts import quartile_bars
from benchmarks.measuring import (
    REDIS_CONFIG,
    Bench,
    Result,
    Target,
    median,
    percentile_columns,
    quartiles,
)
from celery_native_delay import Delay
from celery_native_delay.bulk import bulk
from celery_native_delay.records.interface import IndexEntry
from celery_native_delay.records.opened import records_at
from celery_native_delay.testing import private_redis
from tests.postgresql import private_postgresql
from tests.waiting import wait_until

ROUNDS = 40
BLOCK = 50
"""The number of consecutive publishes of one variant."""
CHECKS = 10_000
ENTRY_BYTES = 900
FEW, MANY = 100_000, 1_000_000
LOOKS = 20
PAGE = 50
ANSWER_SECONDS = 120
FLOWER_IS_LATE = "Flower's IO loop is late while it is asked"


def run(bench: Bench) -> Result:
    with private_redis(config=REDIS_CONFIG) as redis, private_postgresql() as postgresql:
        places = {"Redis": redis.url, "PostgreSQL": postgresql.new_database()}
        measured = publishes(bench, places)
        checks = {place: worker_checks(bench, url) for place, url in places.items()}
    database = look_at_database(bench, bench.count(FEW, at_least=500))
    off = measured.pop("")
    rows = [row("RabbitMQ: apply_async, without records", off[0])]
    for place, on in measured.items():
        rows.append(row(f"RabbitMQ: apply_async, records in {place}", on[0]))
        rows.append(row(f"RabbitMQ: a worker asks {place} about a task", checks[place]))
    few, all_of_few, asked_ms = looks_at_few(bench, bench.count(FEW, at_least=500))
    many, grown_bytes = looks_at_many(bench, bench.count(MANY, at_least=1_000))
    rows += [row(label, seconds) for label, seconds in (few | all_of_few | many | database).items()]
    rows.append(row(FLOWER_IS_LATE, [late / 1e3 for late in asked_ms]))
    result = Result(
        "List, cancel and reschedule",
        f"Publish: apply_async() with a confirm each, with native_delay_records on a private Redis "
        f"and PostgreSQL, and without, {BLOCK} in a row, alternating, {len(off[1])} rounds. "
        f"Worker's check: {bench.count(CHECKS):,} tasks in the records. Reads: "
        f"Delay(app) on Redis with {bench.count(FEW):,} and {bench.count(MANY):,} waiting tasks, "
        f"{LOOKS} times each, and "
        f"requests to Flower, one at a time.",
        rows,
        [
            *(
                Target(
                    f"publish, records in {place} : none (medians)",
                    median(measured[place][0]) / median(off[0]),
                    "≤",
                    limit,
                )
                for place, limit in (("Redis", 1.25), ("PostgreSQL", 1.6))
            ),
            *(
                Target(
                    f"a worker asks {place}, p50", median(checks[place]) * 1e6, "≤", limit_us, "µs"
                )
                for place, limit_us in (("Redis", 200), ("PostgreSQL", 1_000))
            ),
            *(
                Target(f"{label}, p50", median(seconds) * 1e3, "≤", limit_ms, "ms")
                for found, limit_ms in ((few, 300), (database, 300), (many, 1_000))
                for label, seconds in found.items()
            ),
            Target(f"{FLOWER_IS_LATE}, at worst", max(asked_ms), "≤", 50, "ms"),
            Target("memory of the process that looked at all", grown_bytes / 1e6, "≤", 50, "MB"),
        ],
    )
    result.series = {
        label: quartiles(each * 1e3 for each in seconds) for label, seconds in (few | many).items()
    }
    return result


def row(label: str, seconds: list[float]) -> dict[str, Any]:
    return {"what": label, **percentile_columns(seconds, "ms")}


Measured = tuple[list[float], list[float]]
"""The seconds of each publish, and the CPU seconds per publish in each round."""


def publishes(bench: Bench, places: dict[str, str]) -> dict[str, Measured]:
    """Time publishes with records in each of *places*, and without (the key "")."""
    rounds = bench.count(ROUNDS, at_least=3)
    with ExitStack() as stack:
        ways: dict[str, tuple[Callable[..., object], Measured]] = {}
        for place, url in {**places, "": None}.items():
            settings = {} if url is None else {"records": url}
            app = make_app("ours", stack.enter_context(bench.vhost()), **settings)
            stack.callback(app.close)
            declare_for("ours", app)
            ways[place] = app.tasks[TASK].apply_async, ([], [])
            for index in range(2 * BLOCK):
                ways[place][0]((index,), countdown=3600)
        order = random.Random(6)
        with bench.progress("waiting, publish", rounds) as done:
            for number in range(rounds):
                for send, (seconds, cpu_seconds) in order.sample(list(ways.values()), len(ways)):
                    gc.collect()
                    cpu = process_time()
                    for index in range(BLOCK):
                        started = perf_counter()
                        send((index,), countdown=3600)
                        seconds.append(perf_counter() - started)
                    cpu_seconds.append((process_time() - cpu) / BLOCK)
                done(number + 1)
    return {place: measured for place, (_, measured) in ways.items()}


def worker_checks(bench: Bench, url: str) -> list[float]:
    """Return the seconds of each check that a worker makes in the records at *url*."""
    members = [f"{uuid4()}:{uuid4().hex}" for _ in range(bench.count(CHECKS, at_least=100))]
    checks = []
    records = records_at(url, "bench")
    for member in members:
        records.note(IndexEntry(member, 2**52, "e" * ENTRY_BYTES))
    records.flush()
    for member in members:
        started = perf_counter()
        assert records.received(member) is True
        checks.append(perf_counter() - started)
    records.close()
    return checks


def look_at_database(bench: Bench, count: int) -> Looks:
    """Time the first page of *count* tasks that wait on RabbitMQ with records in PostgreSQL."""
    with private_postgresql() as server, bench.vhost() as vhost:
        app = make_app("ours", vhost, records=server.new_database())
        declare_for("ours", app)
        what = f"waiting: {count:,} tasks, PostgreSQL"
        with bench.progress(what, count) as done, bulk(app) as batch:
            for index in range(count):
                batch.send(TASK, (index,), countdown=3600 + index * 0.1)
                done(index)
        delay = Delay(app)
        wait_until(lambda: delay.count() == count)
        found = looks_at(count, {f"first {PAGE}, PostgreSQL": lambda: delay.ls(limit=PAGE)})
        app.close()
    return found


@contextmanager
def waiting(bench: Bench, count: int) -> Iterator[tuple[str, Delay]]:
    """Run a Redis in which *count* tasks wait; yield its URL and a :class:`Delay`."""
    with private_redis(config=REDIS_CONFIG) as redis:
        app = make_app("ours", redis.url)
        what = f"waiting: {count:,} tasks"
        with bench.progress(what, count) as done, bulk(app) as batch:
            for index in range(count):
                batch.send(TASK, (index,), countdown=3600 + index * 0.1)
                done(index)
        assert Delay(app).count() == count
        yield redis.url, Delay(app)
        app.close()


Looks = dict[str, list[float]]
"""The seconds of each read of waiting tasks, by method of :class:`Delay`."""


def looks_at(count: int, ways: dict[str, Callable[[], Any]]) -> Looks:
    return {
        f"{count:,} waiting: {label}": [timed(look) for _ in range(LOOKS)]
        for label, look in ways.items()
    }


def ways_to_look(delay: Delay, count: int) -> dict[str, Callable[[], Any]]:
    middle = count // 2
    return {
        f"first {PAGE}": lambda: delay.ls(limit=PAGE),
        f"{PAGE} in the middle": lambda: delay.ls(limit=PAGE, offset=middle),
        "count": delay.count,
        "histogram": lambda: delay.histogram(bars=100),
    }


def looks_at_few(bench: Bench, count: int) -> tuple[Looks, Looks, list[float]]:
    """Measure the time of reading a page, and of reading many tasks.

    Also return the lateness of Flower's IO loop in milliseconds.
    """
    with waiting(bench, count) as (url, delay):
        searches: dict[str, Callable[[], Any]] = {
            f"search, first {PAGE} of all": lambda: delay.ls(f"name:{TASK}", limit=PAGE),
            "search that finds nothing": lambda: delay.ls("nothing", limit=PAGE),
        }
        found = looks_at(count, ways_to_look(delay, count) | searches)
        with flower(url) as ask:
            ask("/late")
            pages = {
                f"first {PAGE}": f"/api/delays?limit={PAGE}",
                f"{PAGE} in the middle": f"/api/delays?limit={PAGE}&offset={count // 2}",
                "search that finds nothing": "/api/delays?search=nothing",
                "cards and histogram": "/delays/summary",
            }
            all_of_them = {"10,000": "/api/delays?limit=10000", "ids of all": "/delays/ids"}
            found |= looks_at(count, by_path(ask, pages))
            found_all = looks_at(count, by_path(ask, all_of_them))
            asked_ms = ask("/late")["late_ms"]
    return found, found_all, asked_ms


def by_path(ask: Callable[[str], Any], paths: dict[str, str]) -> dict[str, Callable[[], Any]]:
    return {f"Flower, {label}": partial(ask, path) for label, path in paths.items()}


def looks_at_many(bench: Bench, count: int) -> tuple[Looks, int]:
    """Read many tasks at once. Also return the growth of this process's memory in bytes."""
    with waiting(bench, count) as (_, delay):
        before = getrusage(RUSAGE_SELF).ru_maxrss
        found = looks_at(count, ways_to_look(delay, count))
        return found, 1024 * (getrusage(RUSAGE_SELF).ru_maxrss - before)


@contextmanager
def flower(url: str) -> Iterator[Callable[[str], Any]]:
    """Run Flower; yield a function that requests a path of Flower."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.flower_app", url],
        cwd=REPOSITORY,
        env=os.environ | {"FLOWER_UNAUTHENTICATED_API": "true"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    with process:
        address = process.stdout.readline().strip()

        def ask(path: str) -> Any:
            with urlopen(address + path, timeout=ANSWER_SECONDS) as answer:
                return json.load(answer)

        try:
            yield ask
        finally:
            process.kill()


def timed(look: Callable[[], object]) -> float:
    started = perf_counter()
    look()
    return perf_counter() - started


def draw(result: Result) -> Figure:
    return quartile_bars("Time to read the waiting tasks in Redis", "milliseconds", result.series)
