"""Measure rate limits per key: time of a check, used share of a rate, effect on other tasks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from time import perf_counter_ns
from typing import Any

import redis
from celery import Celery
from matplotlib.figure import Figure

from benchmarks.apps import OTHER_TASK, TASK, running_worker, sending
from benchmarks.charts import bars
from benchmarks.measuring import Bench, Result, Target, median, percentile
from celery_native_delay import Delay, Rate
from celery_native_delay.bulk import bulk
from celery_native_delay.rates.in_records import RecordedLines
from celery_native_delay.rates.line import Asked
from celery_native_delay.records.redis import IndexKeys, RedisRecords
from celery_native_delay.records.redis_link import RedisLink
from celery_native_delay.store.sql import SqlStore
from celery_native_delay.testing import PrivateRedis, private_redis

ASKED = 2_000
SPREAD = 300
KEYS, TASKS_OF_A_KEY = 1_000, 10
BESIDE = 10_000
OTHERS = 4_000
ROUNDS = 3

LIMIT = "10/s"
RATED = {"native_delay_rates": {TASK: {"limit": LIMIT}}}
KEYED = {"native_delay_rates": {TASK: {"limit": "10/m", "key": "header:tenant"}}}
CELERYS = {"task_annotations": {TASK: {"rate_limit": LIMIT}}}
ONE_AT_A_TIME = {"worker_prefetch_multiplier": 1}


def run(bench: Bench) -> Result:
    result = Result(
        "Rates per key",
        f"Check: {bench.count(ASKED, at_least=50):,} times for tasks that start, and as often for "
        f"tasks that have to wait. Rate: {bench.count(SPREAD, at_least=15)} tasks are sent "
        f"together, with a rate of {LIMIT}; starts per second from the first to the last, and the "
        f"most in any window of one second. Other tasks: a worker with two processes and a "
        f"prefetch of one each runs tasks without a rate, alone and beside "
        f"{bench.count(BESIDE, at_least=100):,} rate-limited ones. Workers are prefork; the broker "
        f"is Redis unless the row names another.",
    )
    with private_redis(config="databases 100") as server:
        spread(bench, server, result)
        fair(bench, server, result)
        beside(bench, server, result)
        gate(bench, server, result)  # last: the broker of all scenarios has settled by then
    return result


def row(result: Result, what: str, way: str, figure: float, unit: str, more: str = "") -> None:
    result.rows.append({"what": what, "way": way, "figure": figure, "unit": unit, "also": more})


# ---- the gate --------------------------------------------------------------------------------


def gate(bench: Bench, server: PrivateRedis, result: Result) -> None:
    pool = redis.ConnectionPool.from_url(server.url)
    connection = pool.make_connection()
    link = RedisLink(pool, "Redis", timeout_seconds=1)
    store = SqlStore(f"sqlite:///{bench.folder}/rates.db", "bench", timeout_seconds=5)
    kept: dict[str, RecordedLines] = {
        "Redis": RecordedLines(RedisRecords(link, IndexKeys("bench")), link.close),
        "SQLite": RecordedLines(store.state),
    }
    for where, lines in kept.items():
        starting: list[float] = []
        waiting: list[float] = []
        often, seldom = Rate("10000/s", burst=100_000), Rate("1/h")
        bare: list[float] = []
        several: dict[int, list[float]] = {1: [], 2: [], 3: []}
        for _ in range(
            bench.count(ASKED, at_least=50)
        ):  # alternating, because the machine's speed varies
            if where == "Redis":
                bare.append(pinged_us(connection))
            starting.append(asked_us(lines, often, "starts"))
            waiting.append(asked_us(lines, seldom, "waits"))
            for limits, took in several.items():
                took.append(asked_us(lines, often, *(f"limit {at}" for at in range(limits))))
        p99 = f"p99 {percentile(starting, 99):.0f} and {percentile(waiting, 99):.0f}"
        row(result, "gate", f"{where}, starts", median(starting), "µs", p99)
        row(result, "gate", f"{where}, waits", median(waiting), "µs")
        for limits, took in several.items():
            more = median(took) / median(several[limits - 1]) if limits > 1 else 1.0
            row(result, "gate", f"{where}, {limits} limit(s)", median(took), "µs", f"x {more:.2f}")
            if limits > 1 and where == "Redis":
                target = f"gate with {limits} limits : with one fewer"
                result.targets.append(Target(target, more, "≤", 1.3))
        if where == "Redis":
            row(result, "gate", "a bare PING of Redis", median(bare), "µs")
        lines.close()
    connection.disconnect()
    store.engine.dispose()


def pinged_us(connection: Any) -> float:
    before = perf_counter_ns()
    connection.send_command("PING")
    connection.read_response()
    return (perf_counter_ns() - before) / 1000


def asked_us(lines: RecordedLines, rate: Rate, *tasks: str) -> float:
    asked = [Asked(task, "ada", rate) for task in tasks]
    before = perf_counter_ns()
    lines.ask(asked)
    return (perf_counter_ns() - before) / 1000


# ---- how it is spread ------------------------------------------------------------------------


def spread(bench: Bench, server: PrivateRedis, result: Result) -> None:
    count = bench.count(SPREAD, at_least=15)
    ways: list[tuple[str, str, str, Mapping[str, Any], int]] = [
        ("ours, one worker", "ours", database(server, 1), RATED, 1),
        ("ours, two workers", "ours", database(server, 2), RATED, 2),
        ("Celery's rate_limit, one worker", "held", database(server, 3), CELERYS, 1),
        ("Celery's rate_limit, two workers", "held", database(server, 4), CELERYS, 2),
    ]
    with bench.vhost() as url:
        kept = {"native_delay_store": database(server, 5)}
        ways.insert(2, ("ours, RabbitMQ", "ours", url, RATED | kept, 1))
        for label, method, broker, conf, workers in ways:
            starts = started(bench, label, method, broker, conf, count, workers)
            per_second = (len(starts) - 1) / (starts[-1] - starts[0])
            most = most_in_a_second(starts)
            row(result, "spread", label, per_second, "starts/s", f"at most {most} in a second")
            result.series[label] = [per_second, most]
            if label in ("ours, one worker", "ours, two workers"):
                result.targets.append(Target(f"{label}: used of 10/s", per_second / 10, "≥", 0.98))
                result.targets.append(Target(f"{label}: in any second", most, "≤", 10))


def started(
    bench: Bench,
    label: str,
    method: str,
    url: str,
    conf: Mapping[str, Any],
    count: int,
    workers: int,
) -> list[float]:
    with sending(method, url) as app, ExitStack() as stack:
        send(app, TASK, count)
        run = partial(running_worker, method, url, bench.folder, conf=conf)
        running = [stack.enter_context(run()) for _ in range(workers)]

        def start_count() -> int:
            return sum(worker.start_count() for worker in running)

        bench.wait_for(f"rates: {label}", start_count, count, timeout_seconds=count / 5 + 60)
        return sorted(at for worker in running for _, at in worker.starts())


def most_in_a_second(starts: list[float]) -> int:
    return max(
        sum(1 for other in starts[place : place + 1000] if other < first + 1)
        for place, first in enumerate(starts)
    )


# ---- fair between keys -----------------------------------------------------------------------


def fair(bench: Bench, server: PrivateRedis, result: Result) -> None:
    keys = bench.count(KEYS, at_least=10)
    each = TASKS_OF_A_KEY if bench.scale >= 0.5 else 2
    with sending("ours", database(server, 6)) as app:
        with bulk(app) as many:
            for number in range(keys * each):
                tenant = str(number % keys)
                many.send(app.tasks[TASK], (number,), headers={"tenant": tenant})
        url = database(server, 6)
        with running_worker("ours", url, bench.folder, conf=KEYED) as worker:
            bench.wait_for(
                f"rates: {keys} keys", worker.start_count, keys * each, timeout_seconds=300
            )
            starts = worker.starts()
    first = min(at for _, at in starts)
    ends = [0.0] * keys
    for number, at in starts:
        ends[number % keys] = max(ends[number % keys], at - first)
    apart = (max(ends) - min(ends)) / median(ends)
    more = f"from {min(ends):.1f} to {max(ends):.1f} s"
    row(result, "fair", f"ends of {keys:,} keys, {each} tasks each", apart, "of the median", more)
    result.targets.append(Target("ends of all keys, apart", apart, "≤", 0.02))


# ---- others beside it ------------------------------------------------------------------------


def beside(bench: Bench, server: PrivateRedis, result: Result) -> None:
    rounds = ROUNDS if bench.scale >= 0.5 else 1
    rates: dict[str, list[float]] = {"alone": [], "beside": [], "celery": []}
    for number in range(rounds):
        rates["alone"].append(others_per_second(bench, server, "ours", 0, 10 + 3 * number))
        full = bench.count(BESIDE, at_least=100)
        rates["beside"].append(others_per_second(bench, server, "ours", full, 11 + 3 * number))
        if number == 0:
            rates["celery"].append(others_per_second(bench, server, "held", full, 12))
    alone = median(rates["alone"])
    row(result, "others", "alone", alone, "tasks/s")
    for way, label in (("beside", "beside rated ones"), ("celery", "beside Celery's rate_limit")):
        found = median(rates[way])
        row(result, "others", label, found, "tasks/s", f"{found / alone:.2f} of alone")
    ratio = median(rates["beside"]) / alone
    result.targets.append(Target("others beside rated ones : alone", ratio, "≥", 0.95))


def others_per_second(
    bench: Bench, server: PrivateRedis, method: str, rated: int, number: int
) -> float:
    url = database(server, number)
    count = bench.count(OTHERS, at_least=50)
    conf = (RATED if method == "ours" else CELERYS) | ONE_AT_A_TIME
    with sending(method, url) as app:
        send(app, TASK, rated)
        with running_worker(method, url, bench.folder, conf=conf) as worker:
            if rated and method == "ours":
                bench.wait_for(
                    "rates: spread",
                    lambda: rated - Delay(app).count() - worker.start_count() <= 4,
                    True,
                    timeout_seconds=120,
                )
            before = worker.start_count()
            send(app, OTHER_TASK, count, first=1_000_000)

            def others() -> int:
                return sum(1 for index, _ in worker.starts()[before:] if index >= 1_000_000)

            bench.wait_for(f"rates: others {number}", others, count, timeout_seconds=20)
            starts = sorted(at for index, at in worker.starts() if index >= 1_000_000)
    return (len(starts) - 1) / (starts[-1] - starts[0]) if len(starts) > 1 else 0.0


# ---- apps ------------------------------------------------------------------------------------


def database(server: PrivateRedis, number: int) -> str:
    return f"redis://127.0.0.1:{server.port}/{number}"


def send(app: Celery, task: str, count: int, *, first: int = 0) -> None:
    with app.producer_or_acquire() as producer:
        for index in range(first, first + count):
            app.tasks[task].apply_async((index,), producer=producer)


def draw(result: Result) -> Figure:
    return bars(
        f"Task starts per second with the rate limit {LIMIT}",
        "starts per second (the line ends at the most starts in any second)",
        [
            (label, per_second, (per_second, most), label.startswith("ours"))
            for label, (per_second, most) in result.series.items()
        ],
        limit=10,
    )
