"""Redis: how late delayed messages are, and how many a second, beside BullMQ's delayed jobs."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

import kombu
from matplotlib.figure import Figure

from benchmarks.apps import BOOT_SECONDS
from benchmarks.charts import GREY, OTHERS, OURS, curves_on, figure
from benchmarks.lateness import starts_on
from benchmarks.measuring import (
    REDIS_CONFIG,
    Bench,
    Result,
    Target,
    curve,
    lateness_columns,
    log,
    percentile,
)
from celery_native_delay.testing import PrivateRedis, private_redis
from celery_native_delay.transports.redis.promoter import Promoter

PER_SECOND = 500
MESSAGES = 20_000
SHORTEST_SECONDS, LONGEST_SECONDS = 2.0, 10.0
BURST = 20_000
"""Messages that are due at one moment."""
BURST_SECONDS = 20
"""Until that moment: all have to be sent before."""
TASKS = 2_000
GRACE_SECONDS = 15

QUEUE = "bench"
STOP = b"stop"

BULLMQ = ("bullmq@6", "ioredis@5")
"""It has left the choice of its client to its users."""
BULLMQ_SCRIPT = Path(__file__).with_name("bullmq_delays.mjs")
INSTALL_SECONDS = 180

LIST, BULL, OURS_TASK, HELD_TASK = (
    "ours, destination list",
    "BullMQ, job",
    "ours, task",
    "(a) worker-held ETA, task",
)
COLOURS = {LIST: OURS, BULL: OTHERS[0], OURS_TASK: OURS, HELD_TASK: GREY}


def run(bench: Bench) -> Result:
    delays = chosen_delays(bench.count(MESSAGES, at_least=200), bench.scale)
    burst = bench.count(BURST, at_least=200)
    tasks = chosen_delays(bench.count(TASKS, at_least=50), bench.scale)
    late: dict[str, list[float]] = {}
    rates: dict[str, float] = {}
    notes: list[str] = []
    with private_redis(config=REDIS_CONFIG) as redis:
        server = str(redis.installation)
        late[LIST], rates[LIST] = at_the_list(bench, redis, delays, burst)
    with private_redis(config=REDIS_CONFIG) as redis:
        try:
            late[BULL], rates[BULL], version = in_bullmq(bench, redis, delays, burst)
            notes.append(f"BullMQ {version}.")
        except BullMQMissing as exc:
            notes.append(f"Without BullMQ: {exc}.")
            log(f"redis-lateness: without BullMQ: {exc}")
    for label, method in ((OURS_TASK, "ours"), (HELD_TASK, "held")):
        with private_redis(config=REDIS_CONFIG) as redis:
            what = f"redis-lateness, {label}"
            late[label] = starts_on(redis.url, bench, method, tasks, what)
    result = Result(
        "Redis: lateness",
        f"{server}. {len(delays):,} messages with random delays of {SHORTEST_SECONDS:g}-"
        f"{max(delays):.0f} s, seeded, the same for each method, sent at {PER_SECOND} a second "
        f"while others fall due. Ours: one promoting process; a client that waits in BRPOP at the "
        f"destination list notes the time. BullMQ: one Worker with concurrency 100 notes when it "
        f"has the job. Messages per second: {burst:,} that are due at one moment, from then until "
        f"the last is there. Task: {len(tasks):,} tasks; a prefork worker with two processes notes "
        f"the start. Each has a server of its own, with an append-only file.",
    )
    sent = {LIST: len(delays), BULL: len(delays), OURS_TASK: len(tasks), HELD_TASK: len(tasks)}
    for label, late_ms in late.items():
        result.rows.append(
            {
                "method": label,
                **lateness_columns(late_ms),
                "earliest ms": percentile(late_ms, 0),
                "messages/s": rates.get(label, float("nan")),
                "missing": sent[label] - len(late_ms),
            }
        )
        result.series[label] = curve(late_ms)
    ours, held = late[OURS_TASK], late[HELD_TASK]
    result.targets = [
        Target("p50, due to destination list", percentile(late[LIST], 50), "≤", 1, "ms"),
        Target("p99, due to destination list", percentile(late[LIST], 99), "≤", 10, "ms"),
        *(
            Target(
                f"p{percent}, due to start of the task, against (a)'s plus 3 ms",
                percentile(ours, percent),
                "≤",
                percentile(held, percent) + 3,
                "ms",
            )
            for percent in (50, 99)
        ),
    ]
    result.notes += notes
    return result


def chosen_delays(count: int, scale: float) -> list[float]:
    chosen = random.Random(3)
    longest = LONGEST_SECONDS if scale >= 0.5 else 4.0
    return [round(chosen.uniform(SHORTEST_SECONDS, longest), 3) for _ in range(count)]


# ---- ours, up to the destination list --------------------------------------------------------


def at_the_list(
    bench: Bench, redis: PrivateRedis, delays: list[float], burst: int
) -> tuple[list[float], float]:
    """Milliseconds that each message is late, and messages a second in a burst."""
    with beside(_promote, redis.url), delaying(redis.url) as connection:
        send = connection.Producer().publish
        with beside(_pop, str(redis.socket)) as popped:
            started = monotonic()
            with bench.progress("redis-lateness, ours: publish", len(delays)) as done:
                for index, delay in enumerate(delays):
                    sleep(max(0.0, started + index / PER_SECOND - monotonic()))
                    send(index, routing_key=QUEUE, headers={"eta": iso(time() + delay)})
                    done(index)
            arrivals = stopped(bench, redis, popped, len(delays))
        with beside(_pop, str(redis.socket)) as popped:
            wait = burst_seconds(bench)
            due = time() + wait
            with bench.progress("redis-lateness, ours: publish at one moment", burst) as done:
                for index in range(burst):
                    send(index, routing_key=QUEUE, headers={"eta": iso(due)})
                    done(index)
            if time() > due:
                log(f"redis-lateness: {burst} messages took longer than {wait} s to send")
            at_once = stopped(bench, redis, popped, burst)
    late_ms = [(at - datetime.fromisoformat(eta).timestamp()) * 1000 for eta, at in arrivals]
    return late_ms, len(at_once) / (max(at for _, at in at_once) - due)


def burst_seconds(bench: Bench) -> float:
    return BURST_SECONDS if bench.scale >= 0.5 else 4.0


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds")


def delaying(url: str, **options: Any) -> Any:
    return kombu.Connection(url, transport_options={"native_delay": True, **options})


def stopped(bench: Bench, redis: PrivateRedis, popped: Pipe, count: int) -> list[tuple[str, float]]:
    """ETA and time of all arrivals, once nothing waits and the list is empty."""
    client = redis.client

    def gone() -> int:
        return count - int(client.zcard("celery_delay.v2.due")) - int(client.llen(QUEUE))

    longest = max(LONGEST_SECONDS, BURST_SECONDS) + GRACE_SECONDS
    bench.wait_for("redis-lateness, ours: arrive", gone, count, timeout_seconds=longest)
    client.lpush(QUEUE, STOP)
    arrivals: list[tuple[str, float]] = popped.recv()
    return arrivals


@contextmanager
def beside(target: Callable[[str, Pipe], None], address: str) -> Iterator[Pipe]:
    """Run *target* in a process of its own until the block ends; it says when it is ready."""
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=target, args=(address, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not pipe.poll(BOOT_SECONDS):
            raise RuntimeError(f"{target.__name__} did not start within {BOOT_SECONDS} s")
        pipe.recv()
        yield pipe
    finally:
        process.kill()
        process.join()


def _promote(url: str, pipe: Pipe) -> None:
    promoter = Promoter(lambda *, transport_options: delaying(url, **transport_options))
    pipe.send("ready")
    promoter.run()


def _pop(path: str, pipe: Pipe) -> None:
    """Pop with as little of a client as there can be: its own time counts as ours."""
    arrivals: list[tuple[bytes, float]] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        pipe.send("ready")
        while True:
            server.sendall(b"BRPOP %s 0\r\n" % QUEUE.encode())
            reply = server.recv(65_536)
            now = time()
            if reply.endswith(b"\r\n%s\r\n" % STOP):
                break
            arrivals.append((reply, now))
    pipe.send([(_eta_of(reply), at) for reply, at in arrivals])
    pipe.recv()


def _eta_of(reply: bytes) -> str:
    """The envelope is the last of five lines: two strings, each after its length, and a count."""
    eta: str = json.loads(reply.split(b"\r\n")[4])["headers"]["eta"]
    return eta


# ---- BullMQ ----------------------------------------------------------------------------------


class BullMQMissing(Exception):
    """BullMQ cannot run here; the message says why."""


def in_bullmq(
    bench: Bench, redis: PrivateRedis, delays: list[float], burst: int
) -> tuple[list[float], float, str]:
    """The same with BullMQ's delayed jobs, and its version."""
    folder = bench.folder / "bullmq"
    install_bullmq(folder)
    order = {
        "port": redis.port,
        "perSecond": PER_SECOND,
        "delaysMs": [delay * 1000 for delay in delays],
        "burst": burst,
        "burstMs": burst_seconds(bench) * 1000,
        "graceMs": GRACE_SECONDS * 1000,
    }
    (folder / "order.json").write_text(json.dumps(order))
    with bench.progress("redis-lateness, BullMQ", 1):
        done = subprocess.run(
            ["node", BULLMQ_SCRIPT.name, "order.json"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise BullMQMissing(f"its script failed: {done.stderr.strip()[:300]}")
    found = json.loads(done.stdout)
    package = json.loads((folder / "node_modules/bullmq/package.json").read_text())
    return found["lateMs"], found["perSecond"], package["version"]


def install_bullmq(folder: Path) -> None:
    """Install the package into *folder*, and put the script beside it, where it is found."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise BullMQMissing(f"{program} is not installed")
    folder.mkdir()
    (folder / "package.json").write_text('{"private": true}\n')
    shutil.copy(BULLMQ_SCRIPT, folder)
    try:
        done = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *BULLMQ],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
        )
    except subprocess.TimeoutExpired as exc:
        raise BullMQMissing(f"npm install took longer than {INSTALL_SECONDS} s") from exc
    if done.returncode:
        raise BullMQMissing(f"npm install failed: {done.stderr.strip()[-500:]}")


def draw(result: Result) -> Figure:
    picture, axes = figure("Redis: how late delayed messages are", columns=2)
    sides = [
        ("at the consumer", (LIST, BULL)),
        ("at the start of the task", (OURS_TASK, HELD_TASK)),
    ]
    for one, (title, labels) in zip(axes, sides, strict=True):
        lines = [
            (label.split(",")[0].removeprefix("(a) "), result.series[label], COLOURS[label])
            for label in labels
            if label in result.series
        ]
        curves_on(one, title, lines, floor=0.1)
    return picture
