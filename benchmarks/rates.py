"""Measure rate limits per key: time of a check, used share of a rate, effect on other tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from time import perf_counter_ns
from typing import Any

import redis
from matplotlib.figure import Figure

from benchmarks.apps import OTHER_TASK, TASK, running_worker, send_all, sending
from benchmarks.charts import bars
from benchmarks.measuring import Bench, Result, Target, median, percentile
from celery_native_delay import Delay, Rate
from celery_native_delay.bulk import bulk
from celery_native_delay.rates.in_records import RecordedLines
from celery_native_delay.rates.in_redis import RedisLines
from celery_native_delay.rates.line import Asked
from celery_native_delay.records.redis import IndexKeys
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
    store = SqlStore(f"sqlite:///{bench.folder}/rates.db", "bench", timeout_seconds=5)
    in_redis = RedisLines(pool, IndexKeys("bench"), server.url)

    def ping() -> None:
        connection.send_command("PING")
        connection.read_response()

    checks("Redis", in_redis, bench, result, {"a bare PING of Redis": ping})
    checks("SQLite", RecordedLines(store.state), bench, result, {})
    connection.disconnect()
    store.engine.dispose()


def checks(
    where: str,
    lines: RecordedLines,
    bench: Bench,
    result: Result,
    others: dict[str, Callable[[], None]],
) -> None:
    """Measure calls in turn, because the machine's speed varies."""
    often, seldom = Rate("10000/s", burst=100_000), Rate("1/h")
    several = {limits: f"{where}, {limits} limit(s)" for limits in (1, 2, 3)}
    starts, waits = f"{where}, starts", f"{where}, waits"
    asked = {starts: [Asked("starts", "ada", often)], waits: [Asked("waits", "ada", seldom)]}
    for limits, way in several.items():
        asked[way] = [Asked(f"limit {at}", "ada", often) for at in range(limits)]
    calls = {way: partial(lines.ask, each) for way, each in asked.items()} | others
    took: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(bench.count(ASKED, at_least=50)):
        for way, call in calls.items():
            before = perf_counter_ns()
            call()
            took[way].append((perf_counter_ns() - before) / 1000)
    lines.close()
    also = {starts: f"p99 {percentile(took[starts], 99):.0f} and {percentile(took[waits], 99):.0f}"}
    for limits, way in several.items():
        ratio = median(took[way]) / median(took[several[max(limits - 1, 1)]])
        also[way] = f"x {ratio:.2f}"
        if limits > 1 and where == "Redis":
            what = f"gate with {limits} limits : with one fewer"
            result.targets.append(Target(what, ratio, "≤", 1.3))
    for way, each in took.items():
        row(result, "gate", way, median(each), "µs", also.get(way, ""))


# ---- how it is spread ------------------------------------------------------------------------


def spread(bench: Bench, server: PrivateRedis, result: Result) -> None:
    count = bench.count(SPREAD, at_least=15)
    with bench.vhost() as vhost:
        kept = RATED | {"native_delay_store": database(server, 5)}
        ways: dict[str, tuple[str, str, Mapping[str, Any], int]] = {
            "ours, one worker": ("ours", database(server, 1), RATED, 1),
            "ours, two workers": ("ours", database(server, 2), RATED, 2),
            "ours, RabbitMQ": ("ours", vhost, kept, 1),
            "Celery's rate_limit, one worker": ("held", database(server, 3), CELERYS, 1),
            "Celery's rate_limit, two workers": ("held", database(server, 4), CELERYS, 2),
        }
        for label, way in ways.items():
            starts = started(bench, f"rates: {label}", count, *way)
            per_second = (len(starts) - 1) / (starts[-1] - starts[0])
            most = most_in_a_second(starts)
            row(result, "spread", label, per_second, "starts/s", f"at most {most} in a second")
            result.series[label] = [per_second, most]
            if label.startswith("ours") and label != "ours, RabbitMQ":
                result.targets.append(Target(f"{label}: used of 10/s", per_second / 10, "≥", 0.98))
                result.targets.append(Target(f"{label}: in any second", most, "≤", 10))


def started(
    bench: Bench,
    what: str,
    count: int,
    method: str,
    url: str,
    conf: Mapping[str, Any],
    workers: int,
) -> list[float]:
    """Return the times at which *count* tasks started."""
    with sending(method, url) as app, ExitStack() as stack:
        send_all(app, TASK, range(count))
        run = partial(running_worker, method, url, bench.folder, conf=conf)
        running = [stack.enter_context(run()) for _ in range(workers)]

        def start_count() -> int:
            return sum(worker.start_count() for worker in running)

        bench.wait_for(what, start_count, count, timeout_seconds=count / 5 + 60)
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
    url, total = database(server, 6), keys * each
    with sending("ours", url) as app:
        with bulk(app) as many:
            for number in range(total):
                many.send(app.tasks[TASK], (number,), headers={"tenant": str(number % keys)})
        with running_worker("ours", url, bench.folder, conf=KEYED) as worker:
            bench.wait_for(f"rates: {keys} keys", worker.start_count, total, timeout_seconds=300)
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
    full = bench.count(BESIDE, at_least=100)
    rates: dict[str, list[float]] = {"alone": [], "beside": [], "celery": []}
    for number in range(ROUNDS if bench.scale >= 0.5 else 1):
        alone, both = (database(server, at + 3 * number) for at in (10, 11))
        rates["alone"].append(others_per_second(bench, alone, "ours", 0))
        rates["beside"].append(others_per_second(bench, both, "ours", full))
    rates["celery"].append(others_per_second(bench, database(server, 12), "held", full))
    base = median(rates["alone"])
    row(result, "others", "alone", base, "tasks/s")
    for way, label in (("beside", "beside rated ones"), ("celery", "beside Celery's rate_limit")):
        found = median(rates[way])
        row(result, "others", label, found, "tasks/s", f"{found / base:.2f} of alone")
    ratio = median(rates["beside"]) / base
    result.targets.append(Target("others beside rated ones : alone", ratio, "≥", 0.95))


def others_per_second(bench: Bench, url: str, method: str, rated: int) -> float:
    count, first = bench.count(OTHERS, at_least=50), 1_000_000
    conf = (RATED if method == "ours" else CELERYS) | ONE_AT_A_TIME
    with sending(method, url) as app:
        send_all(app, TASK, range(rated))
        with running_worker(method, url, bench.folder, conf=conf) as worker:
            if rated and method == "ours":
                bench.wait_for(
                    "rates: spread",
                    lambda: rated - Delay(app).count() - worker.start_count() <= 4,
                    True,
                    timeout_seconds=120,
                )
            send_all(app, OTHER_TASK, range(first, first + count))

            def others() -> list[float]:
                return sorted(at for index, at in worker.starts() if index >= first)

            bench.wait_for("rates: others", lambda: len(others()), count, timeout_seconds=20)
            starts = others()
    return (len(starts) - 1) / (starts[-1] - starts[0]) if len(starts) > 1 else 0.0


def database(server: PrivateRedis, number: int) -> str:
    return f"redis://127.0.0.1:{server.port}/{number}"


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
