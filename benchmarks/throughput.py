"""Measure how fast one worker runs delayed tasks, compared with immediate tasks."""

from __future__ import annotations

from datetime import UTC, datetime
from time import sleep, time
from typing import Any

from matplotlib.figure import Figure

from benchmarks.apps import TASK, running_worker, send_all, sending, waiting_in
from benchmarks.charts import bars
from benchmarks.measuring import Bench, Result, Target, median
from celery_native_delay.bulk import bulk

TASKS = 15_000
ROUNDS = 3
COUNTDOWN_SECONDS = 12
"""A countdown longer than publishing all tasks, so that no task is due before the last publish."""
LABELS = {
    "now": "sent without delay",
    "ours": "ours, countdown=12",
    "moment": "ours, all due at one moment",
    "celery": "(b) Celery's own, countdown=12",
}


def run(bench: Bench) -> Result:
    count = bench.count(TASKS, at_least=300)
    rounds = ROUNDS if bench.scale >= 0.5 else 1
    rates: dict[str, list[float]] = {way: [] for way in LABELS}
    missing = dict.fromkeys(rates, 0)
    burst_seconds: list[float] = []
    for number in range(rounds):
        # Rotate the order by one each time, so that no way is always first or last.
        order = [*rates][number % len(rates) :] + [*rates][: number % len(rates)]
        for way in order:
            what = f"throughput {number + 1}/{rounds}, {way}"
            rate, arrived, run_count = measure(bench, way, count, what)
            rates[way].append(rate)
            missing[way] += count - run_count
            if way == "moment":
                burst_seconds.append(arrived)
    result = Result(
        "Throughput of matured tasks",
        f"{count:,} tasks are in one quorum queue: sent without delay, or due after a delay. Then "
        f"a prefork worker with two processes starts. Tasks per second count from the first start "
        f"of a task to the last. {rounds} rounds, in alternating order. A countdown of whole "
        f"seconds takes two hops here. Tasks that are due at one moment have different delays, and "
        f"take about four hops.",
    )
    base = median(rates["now"])
    for way, label in LABELS.items():
        lowest, middle, highest = min(rates[way]), median(rates[way]), max(rates[way])
        row = {"tasks": label, "tasks/s, median": middle, "lowest": lowest, "highest": highest}
        result.rows.append(row | {"this : immediate": middle / base, "not run": missing[way]})
        result.series[label] = [lowest, middle, highest]
    what = f"{LABELS['ours']} : {LABELS['now']}"
    result.targets = [Target(what, median(rates["ours"]) / base, "≥", 0.95)]
    result.notes.append(
        f"The broker needs time for {count:,} messages that are due at one moment: the last one "
        f"reached the queue {median(burst_seconds):.1f} s after the due time (checked every "
        f"0.1 s)."
    )
    return result


def measure(bench: Bench, way: str, count: int, what: str) -> tuple[float, float, int]:
    """Measure one way of sending *count* tasks.

    Returns:
        Tasks per second, seconds from the last due time to the last task, and the number of tasks
        run.
    """
    method = "ours" if way in ("ours", "moment") else "celery"
    countdown = COUNTDOWN_SECONDS if bench.scale >= 0.5 else 3
    with bench.vhost() as url, sending(method, url) as app:
        due = time() + countdown
        if way == "now":
            send_all(app, TASK, range(count))
        elif way == "celery":
            send_all(app, TASK, range(count), countdown=countdown)
        else:
            eta = datetime.fromtimestamp(due, UTC)
            when: Any = {"countdown": countdown} if way == "ours" else {"eta": eta}
            with bulk(app) as batch:
                for index in range(count):
                    batch.send(TASK, (index,), **when)
        if way != "moment":
            due = time() + countdown
        bench.wait_for(
            f"{what}: mature",
            lambda: waiting_in(url),
            count,
            timeout_seconds=COUNTDOWN_SECONDS + 60,
            every_seconds=0.1,
        )
        arrived = time() - due
        if way == "celery":
            sleep(max(0.0, due + 1 - time()))  # it came up to a second early
        with running_worker(method, url, bench.folder) as worker:
            bench.wait_for(f"{what}: run", worker.start_count, count, timeout_seconds=120)
            starts = [at for _, at in worker.starts()]
    if len(starts) < 2:
        return 0.0, arrived, len(starts)
    return (len(starts) - 1) / (max(starts) - min(starts)), arrived, len(starts)


def draw(result: Result) -> Figure:
    return bars(
        "Tasks per second of one worker (median; the line: lowest to highest)",
        "tasks per second",
        [
            (label, middle, (low, high), label.startswith("ours"))
            for label, (low, middle, high) in result.series.items()
        ],
    )
