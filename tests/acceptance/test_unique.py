"""Unique tasks under killed workers: never two at once per key, and every key becomes free."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from itertools import count, cycle, pairwise
from pathlib import Path
from random import Random
from threading import Event
from time import sleep, time
from typing import Any

import pytest
from kombu.exceptions import OperationalError

from celery_native_delay import Delay, KeyedResult
from celery_native_delay.testing import require_redis
from pytest_celery_native_delay import installed
from tests.acceptance.worker import Fleet, fleet_on
from tests.brokers import ON_SYSTEM, in_ci
from tests.sentinel import PrivateSentinel, private_sentinel
from tests.traffic import beside
from tests.waiting import wait_until

KEYS = ("a", "b", "c")

#: Of the lease in these workers; in others it is a minute.
LEASE_SECONDS = 3.0

KILLS = 2


@pytest.fixture
def fleet(request: pytest.FixtureRequest, fleet_at: Callable[..., Fleet]) -> Fleet:
    """On Redis, the short visibility timeout delivers messages again while their tasks run."""
    conf: dict[str, Any] = {"tests_lease_seconds": LEASE_SECONDS}
    if request.param == "redis":
        conf["broker_transport_options"] = {"visibility_timeout": 2}
    return fleet_at(request.param, **conf)


def phases(fleet: Fleet) -> list[dict[str, Any]]:
    file = Path(f"{fleet.record.path}.phases")
    lines, _, _ = (file.read_text() if file.exists() else "").rpartition("\n")
    return [json.loads(line) for line in lines.splitlines()]


def spans(fleet: Fleet, killed: dict[int, float]) -> dict[str, list[tuple[float, float]]]:
    """Start and end of each run by key; a run ends when its process is killed."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    open_runs: dict[int, dict[str, Any]] = {}
    for line in phases(fleet):
        if line["phase"] == "begins":
            assert line["pid"] not in open_runs
            open_runs[line["pid"]] = line
        else:
            begun = open_runs.pop(line["pid"])
            assert begun["id"] == line["id"]
            found[line["key"]].append((begun["at"], line["at"]))
    for pid, begun in open_runs.items():
        found[begun["key"]].append((begun["at"], killed[pid]))
    return {key: sorted(each) for key, each in found.items()}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("fleet", ["redis", in_ci(f"{ON_SYSTEM.id}-redis")], indirect=True)
def test_never_two_at_once_with_killed_workers_and_redeliveries(fleet: Fleet) -> None:
    """In half of the kills only the main process dies, and its pool processes go on."""
    delay, random = Delay(fleet.app()), Random(7)
    alone = fleet.app().signature("alone")
    stopping, numbers = Event(), count()
    killed: dict[int, float] = {}
    orphans: set[int] = set()

    def watch_orphans() -> None:
        while orphans or not stopping.wait(0.02):
            for pid in [pid for pid in orphans if not is_alive(pid)]:
                killed[pid] = time()
                orphans.discard(pid)

    def produce() -> None:
        for key in cycle(KEYS):
            if stopping.is_set():
                return
            seconds = 5.0 if next(numbers) % 40 == 0 else random.uniform(0, 0.3)
            delay.unique(alone.clone(args=(key, seconds)), key=key)
            stopping.wait(0.02)

    def ended() -> int:
        return sum(line["phase"] == "ends" for line in phases(fleet))

    def of_keys() -> Counter[str]:
        return Counter(line["key"] for line in phases(fleet))

    workers = [fleet.worker(), fleet.worker()]
    with beside(produce, stop=stopping.set), beside(watch_orphans, stop=stopping.set):
        for number in range(KILLS):
            done = ended()
            wait_until(lambda done=done: ended() >= done + 5)
            sleep(random.uniform(0, 1))
            victim = workers.pop(0)
            pool = children_of(victim.process.pid)
            if number % 2:
                os.kill(victim.process.pid, signal.SIGKILL)
                victim.process.wait()
                orphans.update(pool)
            else:
                victim.kill()
                killed |= dict.fromkeys(pool, time())
            workers.append(fleet.worker(wait=False))
        before = of_keys()
        # Every key is free again, and goes on.
        wait_until(lambda: min((of_keys() - before)[key] for key in KEYS) >= 4)
    for worker in workers:
        worker.stop()
    assert_never_two_at_once(spans(fleet, killed))


def assert_never_two_at_once(found: dict[str, list[tuple[float, float]]]) -> None:
    for key, each in found.items():
        for (_, end), (begin, _) in pairwise(each):
            assert begin >= end, f"{key}: one began {end - begin} s before the other had ended"


@pytest.mark.ci
# kombu leaves its connections to a Sentinel to the garbage collector if no master answers.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_never_two_at_once_through_a_failover_that_lost_nothing(tmp_path: Path) -> None:
    """The replica has all writes. Calls fail during the failover, running tasks go on."""
    random, stopping, keys = Random(7), Event(), list(KEYS)

    def produce() -> None:
        app = fleet.app()
        delay, alone = Delay(app), app.signature("alone")
        while not stopping.wait(0.02):
            key, seconds = random.choice(keys), random.uniform(0, 1)
            with suppress(OperationalError):
                delay.unique(alone.clone(args=(key, seconds)), key=key)

    def ended(of: Iterable[str]) -> bool:
        lines = [line["key"] for line in phases(fleet) if line["phase"] == "ends"]
        return all(lines.count(key) >= 4 for key in of)

    installed(require_redis, "redis")
    with private_sentinel(server="redis") as sentinel, ExitStack() as stack:
        options = {"master_name": sentinel.master_name, "visibility_timeout": 2}
        conf = {"broker_transport_options": options}
        fleet = stack.enter_context(fleet_on(sentinel.url, tmp_path, **conf))
        workers = [fleet.worker(wait=False), fleet.worker()]
        for _ in range(2):
            stack.enter_context(beside(produce, stop=stopping.set))
        wait_until(lambda: ended(KEYS))
        replicate(sentinel)
        sentinel.failover()
        # kombu may end a worker that acknowledges just then: a supervisor starts another.
        workers += [fleet.worker(wait=False), fleet.worker()]
        # Not the same: kombu may lose a message that a worker was just about to take.
        keys[:] = [f"{key} after it" for key in KEYS]
        wait_until(lambda: ended(keys))
        stopping.set()
        for worker in workers:
            worker.stop()
    # The end of a task is unknown if its worker was killed so.
    assert_never_two_at_once(spans(fleet, defaultdict(float)))


def replicate(sentinel: PrivateSentinel) -> None:
    """Pause all writes, and wait until the replica has the earlier ones."""
    master = sentinel.master
    # A Sentinel also writes to the master, and a paused write blocks its checks.
    sentinel.client.sentinel_set(sentinel.master_name, "down-after-milliseconds", 5000)
    (replica,) = (node for node in sentinel.nodes if node is not master)
    master.client.client_pause(60_000, all=False)
    written = master.client.info("replication")["master_repl_offset"]
    wait_until(lambda: replica.client.info("replication")["slave_repl_offset"] >= written)


@pytest.mark.parametrize("fleet", ["redis", in_ci(f"{ON_SYSTEM.id}-redis")], indirect=True)
def test_a_task_that_ended_or_never_runs_frees_its_key(fleet: Fleet) -> None:
    delay, app = Delay(fleet.app()), fleet.app()

    def call(key: str, name: str, *args: Any, **options: Any) -> KeyedResult:
        return delay.unique(app.signature(name, args=args).set(**options), key=key)

    cancelled = call("a", "note", 1, countdown=30)
    assert delay.cancel(cancelled)
    expired = call("b", "note", 1, expires=0.01)
    failed = call("c", "hold", "not a number")
    retried = call("d", "again", 1, 1.0)
    unknown = call("e", "nobody.knows")
    # RabbitMQ's own expiration, which runs out in a level; on Redis the task runs.
    stale = call("f", "note", 1, expiration=0.1, countdown=1)
    fleet.worker(pool="threads", tests_lease_seconds=600)
    for before, key, *again in (
        (cancelled, "a", "note", 2),
        (expired, "b", "note", 2),
        (failed, "c", "hold", 0),
        (unknown, "e", "nobody.knows"),
        (stale, "f", "note", 2),
    ):
        wait_until(lambda args=(key, *again), before=before: call(*args).id != before.id)
    fleet.record.wait_for(1, task_id=retried.id)
    assert call("d", "again", 0, 0).id == retried.id
    fleet.record.wait_for(2, task_id=retried.id)
    wait_until(lambda: call("d", "again", 0, 0).id != retried.id)


@pytest.mark.ci
@pytest.mark.parametrize("fleet", ["redis", f"{ON_SYSTEM.id}-redis"], indirect=True)
def test_a_task_requeued_after_its_process_was_killed_gets_its_key_at_once(fleet: Fleet) -> None:
    """The task does not wait for the lease of its first attempt."""
    delay, mortal = Delay(fleet.app()), fleet.app().signature("mortal")
    fleet.worker(tests_lease_seconds=600)
    killed = delay.unique(mortal, key="a")
    fleet.record.wait_for(2, task_id=killed.id)
    wait_until(lambda: delay.unique(mortal, key="a").id != killed.id)


@pytest.mark.ci
@pytest.mark.parametrize("fleet", ["sqla"], indirect=True)
def test_until_start_frees_the_key_soon_if_a_killed_worker_lost_the_message(fleet: Fleet) -> None:
    """The message was received but not started; kombu's sqlalchemy transport has no other copy."""
    delay, app = Delay(fleet.app()), fleet.app()
    note = app.signature("note", args=(1,))
    worker = fleet.worker(concurrency=1)
    held = app.signature("hold", args=(3600,)).apply_async()
    fleet.record.wait_for(1, task_id=held.id)
    lost = delay.unique(note, key="a", until="start")
    wait_until(lambda: f"note[{lost.id}] received" in worker.log)
    worker.kill()
    fleet.worker()

    def another() -> str | None:
        result = delay.unique(note, key="a", until="start")
        return None if result.id == lost.id else str(result.id)

    fleet.record.wait_for(1, task_id=wait_until(another))
