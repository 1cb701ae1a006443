"""Measure 1,000 schedule entries of one minute: CPU time and lateness, ours and beat's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from datetime import datetime, timedelta
from math import ceil, floor
from time import sleep, time
from typing import Any

from celery.schedules import BaseSchedule, crontab, schedstate
from matplotlib.figure import Figure

from benchmarks.apps import TASK, Worker, make_app, running, running_worker
from benchmarks.charts import GREY, OURS, curves_on, figure
from benchmarks.measuring import Bench, Result, Target, cpu_seconds, curve, lateness_columns, log
from celery_native_delay import Delay

ENTRIES = 1_000
MINUTE = 60.0
PLANTED_SECONDS = 60
"""The number of seconds in which a worker must have published all entries."""

GRACE_SECONDS = 8
"""The number of seconds from the last due time to the end of a run."""

AT_ONCE, SPREAD = "all at second 0", "spread over the minute"
LABELS = {"ours": "ours, no beat", "beat": "beat and a worker"}


def run(bench: Bench) -> Result:
    count = bench.count(ENTRIES, at_least=20)
    result = Result(
        "Schedule entries",
        f"{count:,} entries, each due once a minute, for one minute: {AT_ONCE} (a crontab), or "
        f"{SPREAD}. Ours: one prefork worker with two processes. Beat: `celery beat` and the same "
        f"worker without this package. CPU seconds are of this minute, after all entries were "
        f"published. Lateness is the start of the task minus the due time. RabbitMQ has its "
        f"records in Redis.",
    )
    for broker in ("Redis", "RabbitMQ"):
        for when in (AT_ONCE, SPREAD):
            found = {}
            for method in LABELS:
                found[method] = measured(bench, broker, when, method, count)
                row, late_ms = found[method]
                log(str(row))
                result.rows.append(row)
                result.series[f"{broker}/{when}/{method}"] = curve(late_ms)
            ratio = found["ours"][0]["CPU s"] / found["beat"][0]["CPU s"]
            result.targets.append(
                Target(f"{broker}, {when}, CPU : beat's and its worker's", ratio, "≤", 1)
            )
    return result


def measured(
    bench: Bench, broker: str, when: str, method: str, count: int
) -> tuple[dict[str, Any], list[float]]:
    """Return a row of the table, and the lateness in milliseconds of each start in one minute."""
    what = f"schedules, {broker}, {when}, {method}"
    conf: dict[str, Any] = {"bench_entries": [count, when]}
    with ExitStack() as stack:
        redis = stack.enter_context(bench.redis())
        url, processes = redis.url, {"brokers": [redis.pid]}
        if broker == "RabbitMQ":
            url = stack.enter_context(bench.vhost())
            processes["brokers"].append(bench.broker.pid)
        if method == "ours":
            conf["native_delay_schedules"] = True
            if broker == "RabbitMQ":
                conf["native_delay_store"] = redis.url
            worker = stack.enter_context(running_worker("ours", url, bench.folder, conf=conf))
            store = {"store": redis.url} if broker == "RabbitMQ" else {}
            app = make_app("ours", url, schedules=True, **store)
            stack.callback(app.close)
            planted, patience = Delay(app).schedules(), PLANTED_SECONDS
            bench.wait_for(what, lambda: len(list(planted)), count, timeout_seconds=patience)
        else:
            plain = "celery" if broker == "RabbitMQ" else "held"
            worker = stack.enter_context(running_worker(plain, url, bench.folder, conf=conf))
            files = f"--schedule={bench.folder}/beat-{time()}", "--pidfile="
            said = bench.folder / "beat.log"
            beat = stack.enter_context(running(plain, url, conf, "beat", *files, log=said))
            processes["beat"] = [beat.pid]
        processes["worker"] = [worker.pid]
        late_ms, cpu = one_minute(what, when, count, worker, processes)
    of_beat = cpu.get("beat", 0.0)
    row = {
        "broker": broker,
        "due": when,
        "method": LABELS[method],
        "CPU s": cpu["worker"] + of_beat,
        "of it beat": of_beat,
        "brokers' CPU s": cpu["brokers"],
        **lateness_columns(late_ms),
        "missing": count - len(late_ms),
    }
    return row, late_ms


def one_minute(
    what: str, when: str, count: int, worker: Worker, processes: Mapping[str, list[int | None]]
) -> tuple[list[float], dict[str, float]]:
    """Return the lateness of each start due in a minute, and the CPU seconds of that minute."""
    # Let the boot of the processes end first, and let the minute end after the starts.
    begins = time() + 5
    if when == AT_ONCE:
        begins = MINUTE * ceil((time() + 15) / MINUTE) - 10

    def cpus() -> dict[str, float]:
        return {name: sum(map(cpu_seconds, pids)) for name, pids in processes.items()}

    log(what)
    sleep(max(begins - time(), 0))
    before = cpus()
    sleep(max(begins + MINUTE - time(), 0))
    after = cpus()
    sleep(GRACE_SECONDS)
    late_ms = []
    for index, at in worker.starts():
        second = second_of(index, count, when)
        due = floor((at - second) / MINUTE) * MINUTE + second
        if begins <= due < begins + MINUTE:
            late_ms.append((at - due) * 1000)
    return late_ms, {name: after[name] - before[name] for name in processes}


# ---- the entries -----------------------------------------------------------------------------


class Minutely(BaseSchedule):  # type: ignore[misc]
    """A schedule that is due at one moment of each minute, *second* after the minute begins."""

    def __init__(self, second: float) -> None:
        super().__init__()
        self.second = second

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        minutes = floor((last_run_at.timestamp() - self.second) / MINUTE) + 1
        due = minutes * MINUTE + self.second
        return timedelta(seconds=due - self.now().timestamp())

    def is_due(self, last_run_at: datetime) -> Any:
        seconds = self.remaining_estimate(last_run_at).total_seconds()
        if seconds > 0:
            return schedstate(False, seconds)
        return schedstate(True, self.remaining_estimate(self.now()).total_seconds())

    def __reduce__(self) -> tuple[type[Minutely], tuple[float]]:
        return Minutely, (self.second,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Minutely) and other.second == self.second

    def __hash__(self) -> int:
        return hash(self.second)


def entries(count: int, when: str) -> dict[str, dict[str, Any]]:
    """Return *count* entries as ``beat_schedule`` has them."""
    return {
        f"entry-{index}": {
            "task": TASK,
            "schedule": crontab() if when == AT_ONCE else Minutely(second_of(index, count, when)),
            "args": (index,),
        }
        for index in range(count)
    }


def second_of(index: int, count: int, when: str) -> float:
    return 0.0 if when == AT_ONCE else index * MINUTE / count


def draw(result: Result) -> Figure:
    picture, panels = figure("Lateness of periodic tasks", height=6.4, rows=2, columns=2)
    names = [(broker, when) for broker in ("Redis", "RabbitMQ") for when in (AT_ONCE, SPREAD)]
    for axes, (broker, when) in zip(panels, names, strict=True):
        lines = [
            (method, values, colour)
            for method, colour in (("ours", OURS), ("beat", GREY))
            if (values := result.series.get(f"{broker}/{when}/{method}"))
        ]
        curves_on(axes, f"{broker}, {when}", lines)
    return picture
