"""Measure reading many waiting tasks: in Redis, in PostgreSQL and through Flower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from resource import RUSAGE_SELF, getrusage
from time import perf_counter
from typing import Any
from urllib.request import urlopen

from matplotlib.figure import Figure
from sqlalchemy import create_engine, text

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
from celery_native_delay.testing import private_redis
from tests.postgresql import private_postgresql

FEW, MANY = 100_000, 1_000_000
LOOKS = 20
PAGE = 50
ANSWER_SECONDS = 120
FLOWER_IS_LATE = "Flower's IO loop is late while it is asked"


def run(bench: Bench) -> Result:
    few, all_of_few, asked_ms = looks_at_few(bench, bench.count(FEW, at_least=500))
    many, grown_bytes = looks_at_many(bench, bench.count(MANY, at_least=1_000))
    database = looks_at_database(bench, bench.count(MANY, at_least=1_000))
    rows = [row(label, seconds) for label, seconds in (few | all_of_few | many | database).items()]
    rows.append(row(FLOWER_IS_LATE, [late / 1e3 for late in asked_ms]))
    result = Result(
        "List, cancel and reschedule",
        f"Delay(app) with {bench.count(FEW):,} and {bench.count(MANY):,} waiting tasks on a Redis "
        f"broker, and with {bench.count(MANY):,} in a store in PostgreSQL, {LOOKS} times each, and "
        f"requests to Flower, one at a time.",
        rows,
        [
            *(
                Target(f"{label}, p50", median(seconds) * 1e3, "≤", limit_ms, "ms")
                for found, limit_ms in ((few, 300), (database, 300), (many, 1_000))
                for label, seconds in found.items()
                if "finds nothing" not in label  # it reads all tasks: see the table
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


def looks_at_database(bench: Bench, count: int) -> Looks:
    """Measure the time of reading *count* tasks that wait in PostgreSQL beside RabbitMQ."""
    with private_postgresql() as server, bench.vhost() as vhost:
        store = server.new_database()
        app = make_app("ours", vhost, store=store)
        declare_for("ours", app)
        with (
            bench.progress(f"waiting: {count:,} tasks, PostgreSQL", count) as done,
            bulk(app) as batch,
        ):
            for index in range(count):
                batch.send(TASK, (index,), countdown=3600 + index * 0.1)
                done(index)
        delay = Delay(app)
        assert delay.count() == count
        vacuum(store)
        ways = {f"{label}, PostgreSQL": way for label, way in ways_to_look(delay, count).items()}
        found = looks_at(count, ways)
        app.close()
    return found


def vacuum(url: str) -> None:
    """Vacuum the database, as PostgreSQL itself does within a minute of so many new rows."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("VACUUM ANALYZE"))
    engine.dispose()


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
