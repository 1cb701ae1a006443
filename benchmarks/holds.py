"""Hold, release, reschedule and cancel many tasks, and measure what other tasks feel of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Thread
from time import perf_counter, sleep, time

from matplotlib.figure import Figure

from benchmarks.apps import OTHER_TASK, TASK, declare_for, make_app, running_worker
from benchmarks.charts import quartile_bars
from benchmarks.measuring import Bench, Result, Target, percentile_columns, quartiles
from celery_native_delay import Delay
from celery_native_delay.app.holds import TAKEN_UP_SECONDS
from celery_native_delay.bulk import bulk
from tests.postgresql import private_postgresql

HELD = 100_000
BLOCK = 500
"""The number of held tasks that are sent at once, before another task."""
PER_SECOND = 200
"""The rate of the release."""
MOVED_SECONDS = 7200.0
"""The time by which the waiting tasks are moved."""
PROBES = 1 << 31
"""The indexes of the other tasks begin here."""


def run(bench: Bench) -> Result:
    result = Result(
        "Held tasks",
        f"{bench.count(HELD, at_least=1000):,} immediate tasks are held by one worker with two "
        f"processes: after each {BLOCK} of them, another task is sent into the same queue, and its "
        f"time until its start is measured. Then they are released at {PER_SECOND}/s, while other "
        f"tasks are sent each second. At last as many delayed tasks, found by a search, are moved "
        f"by {MOVED_SECONDS / 3600:g} hours, then cancelled.",
    )
    with bench.redis() as redis:
        Drill(bench, "Redis", redis.url, result)
    with private_postgresql() as postgresql, bench.vhost() as vhost:
        Drill(bench, "RabbitMQ and PostgreSQL", vhost, result, store=postgresql.new_database())
    return result


def draw(result: Result) -> Figure:
    return quartile_bars("Other tasks, until their start", "ms", result.series)


class Drill:
    """Holds and releases tasks on one broker."""

    def __init__(self, bench: Bench, name: str, url: str, result: Result, **settings: str) -> None:
        self._result = result
        self._count = bench.count(HELD, at_least=1000)
        self._probes = 0
        self._app = make_app("ours", url, **settings)
        conf = {f"native_delay_{key}": value for key, value in settings.items()}
        declare_for("ours", self._app)
        with running_worker("ours", url, bench.folder, conf=conf) as worker:
            self._worker = worker
            delay = Delay(self._app)
            delay.hold(TASK)
            sleep(TAKEN_UP_SECONDS)
            self._measure(f"{name}: {self._count:,} held", lambda: self._hold(delay))
            released = self._beside(lambda: delay.release(TASK, rate=f"{PER_SECOND}/s"))
            self._measure(f"{name}: released", lambda: released() + self._until_all_ran())
            self._check(name)
            with bulk(self._app) as batch:
                for number in range(self._count):
                    batch.send(TASK, (number,), countdown=86_400)
            waiting = delay.ids(f"name:{TASK}")
            assert len(waiting) == self._count
            moved = self._beside(lambda: delay.reschedule_all(waiting, by=MOVED_SECONDS))
            self._measure(f"{name}: moved", moved)
            cancelled = self._beside(lambda: delay.cancel_all(waiting))
            self._measure(f"{name}: cancelled", cancelled)
            assert delay.count() == 0
        self._app.close()

    def _measure(self, what: str, call: Callable[[], list[float]]) -> None:
        began = perf_counter()
        seconds = call()
        rate = self._count / (perf_counter() - began)
        columns = percentile_columns(seconds, "ms")
        self._result.rows.append(
            {"what": what, "tasks/s": rate, "other tasks": len(seconds), **columns}
        )
        self._result.series[what] = quartiles(each * 1e3 for each in seconds)

    def _hold(self, delay: Delay) -> list[float]:
        seconds = []
        for start in range(0, self._count, BLOCK):
            with bulk(self._app) as batch:
                for number in range(start, min(start + BLOCK, self._count)):
                    batch.send(TASK, (number,))
            seconds.append(self._probe())
        while delay.holds()[0].held < self._count:
            sleep(0.5)
        return seconds

    def _beside(self, call: Callable[[], object]) -> Callable[[], list[float]]:
        """Return a function that sends other tasks until *call* has ended in a thread."""

        def both() -> list[float]:
            thread = Thread(target=call)
            thread.start()
            seconds = []
            while thread.is_alive():
                seconds.append(self._probe())
                thread.join(1)
            return seconds

        return both

    def _until_all_ran(self) -> list[float]:
        seconds = []
        while self._worker.start_count() < self._count + self._probes:
            seconds.append(self._probe())
            sleep(1)
        return seconds

    def _probe(self) -> float:
        """Send another task, and return the seconds until its start."""
        index, began = PROBES + self._probes, time()
        self._probes += 1
        self._app.send_task(OTHER_TASK, (index,))
        while True:
            started = [at for found, at in self._worker.starts(last=1000) if found == index]
            if started:
                return started[0] - began
            sleep(0.01)

    def _check(self, name: str) -> None:
        starts = [(index, at) for index, at in self._worker.starts() if index < PROBES]
        each = Counter(index for index, _ in starts)
        most = max(Counter(int(at) for _, at in starts).values())
        lost = self._count - len(each)
        self._result.targets += [
            Target(f"{name}: held tasks that were lost", lost, "≤", 0),
            Target(f"{name}: runs of one held task", max(each.values()), "≤", 1),
            Target(f"{name}: starts in one second", most, "≤", 2 * PER_SECOND),
        ]
