"""Parts that all scenarios share: broker, scale, progress, percentiles, targets and results."""

from __future__ import annotations

import gc
import os
import platform
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import monotonic, perf_counter, process_time, sleep
from typing import Any, Literal, TypeVar

import numpy

from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis, private_redis, vhost_name

T = TypeVar("T")

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


def percentiles(values: Iterable[float], percents: Sequence[float]) -> list[float]:
    """Return interpolated percentiles of *values*; NaN if there are no values."""
    found = list(values) or [float("nan")]
    return [float(each) for each in numpy.percentile(found, percents)]


def percentile(values: Iterable[float], percent: float) -> float:
    return percentiles(values, [percent])[0]


def median(values: Iterable[float]) -> float:
    return percentile(values, 50)


def quartiles(values: Iterable[float]) -> list[float]:
    """Return the first quartile, median and third quartile, for a bar of a chart."""
    return percentiles(values, (25, 50, 75))


def percentile_columns(seconds: Iterable[float], unit: Literal["µs", "ms"]) -> dict[str, float]:
    """Return the table columns p50, p95 and p99, in *unit*."""
    factor, percents = {"µs": 1e6, "ms": 1e3}[unit], (50, 95, 99)
    found = zip(percents, percentiles(seconds, percents), strict=True)
    return {f"p{percent} {unit}": value * factor for percent, value in found}


def curve(values: Iterable[float]) -> list[float]:
    """Return the value at each percentile of PERCENTILES."""
    return percentiles(values, PERCENTILES)


def lateness_columns(late_ms: list[float]) -> dict[str, float]:
    """Return table columns of lateness in milliseconds; negative values are early starts."""
    columns = percentile_columns((late / 1e3 for late in late_ms), "ms")
    return columns | {"max ms": percentile(late_ms, 100)}


@dataclass(frozen=True)
class Target:
    """A target of a scenario: the measured value, and the bound that it should meet."""

    what: str
    measured: float
    sign: Literal["≤", "≥"]
    limit: float
    unit: str = ""

    @property
    def met(self) -> bool:
        """True if the measured value meets the bound. False if it is NaN, as without results."""
        if self.sign == "≤":
            return self.measured <= self.limit
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
    def redis_url(self) -> Iterator[str]:
        with self.redis() as redis:
            yield redis.url

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
        log(description)
        deadline = monotonic() + timeout_seconds
        while (reached := count()) < total and monotonic() < deadline:
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


class Calls(list[Block]):
    """The calls of one way, a block for each round."""

    @property
    def seconds(self) -> list[float]:
        return [seconds for block in self for seconds in block.seconds]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def cpu_seconds(self) -> float:
        """The median CPU seconds for one call."""
        return median(block.cpu_seconds for block in self)

    @property
    def quartiles_us(self) -> list[float]:
        return quartiles(seconds * 1e6 for seconds in self.seconds)

    @property
    def columns_us(self) -> dict[str, float]:
        return percentile_columns(self.seconds, "µs")


def alternate(what: str, rounds: int, ways: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Take each way once a round, in random order, because the machine's speed varies.

    Returns:
        What each way returned, by round. The first round warms up, and does not count.
    """
    found: dict[str, list[T]] = {way: [] for way in ways}
    order = random.Random(1)
    gc.disable()
    log(what)
    try:
        for _ in range(rounds + 1):
            for way in order.sample(list(ways), len(ways)):
                gc.collect()
                found[way].append(ways[way]())
    finally:
        gc.enable()
    return {way: each[1:] for way, each in found.items()}


def alternating_calls(
    what: str, rounds: int, ways: Mapping[str, Callable[[int], object]], block: int
) -> dict[str, Calls]:
    """Measure blocks of *block* calls of each way; see :func:`alternate`."""
    blocks = {way: partial(block_of, call, block) for way, call in ways.items()}
    return {way: Calls(each) for way, each in alternate(what, rounds, blocks).items()}


# ---- the machine ---------------------------------------------------------------------------


def machine(broker: PrivateRabbitMQ) -> dict[str, str]:
    """Return the hardware, system and versions of a measurement; Linux only."""
    packages = ("celery", "kombu", "amqp", "celery_native_delay")
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": f"{os.cpu_count()} x {model[1] if model else platform.processor()}",
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "RabbitMQ": f"{broker.version}, one node on the same machine",
        "Python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def resident_bytes(pid: int | None) -> int:
    """Return the resident memory of a process and all its children."""
    return 1024 * sum(kilobytes for _, kilobytes in _family(pid))


def cpu_seconds(pid: int | None) -> float:
    """Return the CPU seconds (user and system) of a process and its living children; Linux only."""
    ticks = 0
    for member, _ in _family(pid):
        with suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _family(pid: int | None) -> list[tuple[int, int]]:
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
