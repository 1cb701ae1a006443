"""Parts that all scenarios share: broker, scale, progress, percentiles, targets and results."""

from __future__ import annotations

import gc
import os
import platform
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import monotonic, perf_counter, process_time, sleep
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis, private_redis, vhost_name

T = TypeVar("T")

REFRESH_SECONDS = 0.25

BROKER_OPTIONS = {
    "config": "collect_statistics_interval = 5000",
    "erlang_arguments": "-rabbit quorum_tick_interval 5000",
}
"""Options of RabbitMQ: it collects statistics at the default interval, not as often as in tests."""

REDIS_CONFIG = "appendfsync everysec\n"
"""Configuration of Redis: it saves data as by default, not as in tests."""

PERCENTILES = (*range(100), 99.5, 99.9, 100)
"""The percentiles at which a curve is drawn."""


# ---- figures -------------------------------------------------------------------------------


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the interpolated percentile of *values*; NaN if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Iterable[float]) -> float:
    return percentile(values, 50)


def quartiles(values: Iterable[float]) -> list[float]:
    """Return the first quartile, median and third quartile, for a bar of a chart."""
    ordered = sorted(values)
    return [percentile(ordered, percent) for percent in (25, 50, 75)]


def percentile_columns(seconds: Iterable[float], unit: Literal["µs", "ms"]) -> dict[str, float]:
    """Return the table columns p50, p95 and p99, in *unit*."""
    ordered, factor = sorted(seconds), {"µs": 1e6, "ms": 1e3}[unit]
    return {f"p{p} {unit}": percentile(ordered, p) * factor for p in (50, 95, 99)}


def curve(values: Iterable[float]) -> list[float]:
    """Return the value at each percentile of PERCENTILES."""
    ordered = sorted(values)
    return [percentile(ordered, percent) for percent in PERCENTILES]


def lateness_columns(late_ms: list[float]) -> dict[str, float]:
    """Return table columns of lateness in milliseconds; negative values are early starts."""
    return {
        "p50 ms": percentile(late_ms, 50),
        "p95 ms": percentile(late_ms, 95),
        "p99 ms": percentile(late_ms, 99),
        "max ms": percentile(late_ms, 100),
    }


@dataclass(frozen=True)
class Target:
    """A target of a scenario: the measured value, and the bound that it should meet."""

    what: str
    measured: float
    sign: Literal["≤", "<", "≥"]
    limit: float
    unit: str = ""

    @property
    def met(self) -> bool:
        """True if the measured value meets the bound. False if the value is NaN, as without
        results.
        """
        match self.sign:
            case "≤":
                return self.measured <= self.limit
            case "<":
                return self.measured < self.limit
        return self.measured >= self.limit


@dataclass
class Result:
    """The result of one scenario."""

    title: str
    setup: str
    """A description of the measurement, so that others can repeat the measurement."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The rows of the result table; each row is a dict from column to text or number.

    All rows have the same columns.
    """
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    series: dict[str, Any] = field(default_factory=dict)
    """The data of the chart, by label."""
    date: str = ""
    seconds: float = 0.0
    load_before: float = 0.0
    """The machine's load average in the last minute before the scenario."""


# ---- a run ---------------------------------------------------------------------------------


class Bench:
    """One run of scenarios: the broker that they share, the scale, and a folder for files."""

    def __init__(self, broker: PrivateRabbitMQ, scale: float, folder: Path) -> None:
        self.broker = broker
        self.scale = scale
        self.folder = folder
        """A folder that exists until the run ends."""
        self.console = Console(stderr=True)
        # The progress is drawn by hand: a drawing thread would distort the measurement.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            auto_refresh=False,
        )
        self._refreshed = 0.0

    def count(self, full: int, *, at_least: int = 1) -> int:
        """Return the number *full* of tasks or rounds, multiplied by the run's scale."""
        return max(at_least, round(full * self.scale))

    @contextmanager
    def vhost(self) -> Iterator[str]:
        """Yield the URL of an empty virtual host; delete the virtual host after the block."""
        url = self.broker.new_vhost()
        try:
            yield url
        finally:
            self.broker.delete_vhost(vhost_name(url))

    @contextmanager
    def redis(self) -> Iterator[PrivateRedis]:
        """Run a Redis that makes neither snapshots nor rewrites; end it after the block."""
        with private_redis(config=REDIS_CONFIG + "auto-aof-rewrite-percentage 0") as redis:
            yield redis

    @contextmanager
    def progress(self, description: str, total: float) -> Iterator[Callable[[float], None]]:
        """Show progress up to *total*, and yield a function to report how much is done."""
        task = self._progress.add_task(description, total=round(total))
        self._progress.start()

        def done(count: float) -> None:
            if monotonic() - self._refreshed > REFRESH_SECONDS:
                self._progress.update(task, completed=round(count))
                self._progress.refresh()
                self._refreshed = monotonic()

        try:
            yield done
            self._progress.update(task, completed=round(total))
        finally:
            self._progress.stop()
            self._progress.remove_task(task)

    def wait_for(
        self,
        description: str,
        count: Callable[[], int],
        total: int,
        *,
        timeout_seconds: float,
        every_seconds: float = 0.25,
    ) -> int:
        """Wait until *count* returns *total* or the time is over; return the last count."""
        deadline = monotonic() + timeout_seconds
        with self.progress(description, total) as done:
            while (reached := count()) < total and monotonic() < deadline:
                done(reached)
                sleep(every_seconds)
        return reached


# ---- what alternates ----------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Calls in a row: the seconds of each, and this process's CPU seconds for one of them."""

    seconds: list[float]
    cpu_seconds: float


def block_of(call: Callable[[int], object], count: int) -> Block:
    """Call *call* with 0, 1, … and measure each call."""
    seconds = []
    cpu = process_time()
    for number in range(count):
        began = perf_counter()
        call(number)
        seconds.append(perf_counter() - began)
    return Block(seconds, (process_time() - cpu) / count)


def seconds_of(blocks: Iterable[Block]) -> list[float]:
    """Return the seconds of all calls of some blocks."""
    return [seconds for block in blocks for seconds in block.seconds]


def alternate(
    bench: Bench, what: str, rounds: int, ways: Mapping[str, Callable[[], T]]
) -> dict[str, list[T]]:
    """Take each way once a round, in random order, because the machine's speed varies.

    Returns:
        What each way returned, by round. The first round warms up, and does not count.
    """
    found: dict[str, list[T]] = {way: [] for way in ways}
    order = random.Random(1)
    gc.disable()
    try:
        with bench.progress(what, rounds) as done:
            for number in range(rounds + 1):
                for way in order.sample(list(ways), len(ways)):
                    gc.collect()
                    found[way].append(ways[way]())
                done(number)
    finally:
        gc.enable()
    return {way: each[1:] for way, each in found.items()}


# ---- the machine ---------------------------------------------------------------------------


def machine(broker: PrivateRabbitMQ) -> dict[str, str]:
    """Return the hardware, system and versions of a measurement."""
    packages = ("celery", "kombu", "amqp", "celery_native_delay")
    return {
        "processor": f"{os.cpu_count()} x {_processor()}",
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "RabbitMQ": f"{broker.version}, one node on the same machine",
        "Python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (
        found := re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    ):
        return found[1]
    return platform.processor() or "unknown processor"


def _memory() -> str:
    try:
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return "unknown"
    return f"{pages * page_bytes / 2**30:.0f} GiB"


def load_average() -> float:
    return os.getloadavg()[0]


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and all its children."""
    return 1024 * sum(kilobytes for _, kilobytes in _family(pid))


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds (user and system) of a process and its living children; Linux only."""
    ticks = 0
    for member, _ in _family(pid):
        with suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> list[tuple[int, int]]:
    """Return the process id and resident kilobytes of a process and of all its children."""
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,rss="], capture_output=True, text=True, check=True
    ).stdout
    processes = [tuple(map(int, line.split())) for line in listing.splitlines()]
    family = {pid}
    while more := {child for child, parent, _ in processes if parent in family} - family:
        family |= more
    return [(member, kilobytes) for member, _, kilobytes in processes if member in family]


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
