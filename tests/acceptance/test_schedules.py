"""Schedules in real workers: every occurrence runs, whichever worker is killed, without a beat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

import pytest

from celery_native_delay import Delay
from celery_native_delay.testing import PrivateRedis, private_redis, require_redis
from pytest_celery_native_delay import installed
from tests.acceptance.worker import EARLY_SECONDS, FEW_LEVELS, Fleet, Run, fleet_on
from tests.brokers import ON_SYSTEM, in_ci, on_one_version
from tests.sentinel import private_sentinel
from tests.waiting import PATIENCE_SECONDS, wait_until

#: A relative expiry counts from the due time, so the expiry of a run tells its due time.
EXPIRES_SECONDS = 3600.0


def entries_of(count: int, longest: int) -> dict[str, dict[str, Any]]:
    """Entries of every second up to every *longest* seconds; their runs get their names."""
    return {
        f"tick-{number}": {
            "task": "note",
            "schedule": float(number % longest + 1),
            "args": [f"tick-{number}"],
            "options": {"expires": EXPIRES_SECONDS},
        }
        for number in range(count)
    }


ENTRIES, TICKS = entries_of(10, 5), entries_of(4, 2)
KILL_EVERY_SECONDS, KILLS = 4, 3

#: The three kinds of places that keep the state of entries.
KINDS = pytest.mark.parametrize(
    "fleet", ["redis", *map(in_ci, ("filesystem", "rabbitmq-4.3-postgresql"))], indirect=True
)


#: Entries whose occurrences wait in the broker, and in a store beside one.
BOTH = pytest.mark.parametrize("fleet", ["redis", in_ci(f"{ON_SYSTEM.id}-redis")], indirect=True)


@pytest.fixture(params=["redis"])
def fleet(request: pytest.FixtureRequest, fleet_at: Callable[..., Fleet]) -> Fleet:
    conf: dict[str, Any] = {"native_delay_schedules": True}
    if request.param == "redis":
        # Workers requeue the messages of a killed worker after 5 s.
        restored = {f"unacked_restore_{name}": 1 for name in ("interval", "throttle")}
        restored |= {"visibility_timeout": 5, "unacked_mutex_expire": 5}
        conf["broker_transport_options"] = restored
    return fleet_at(request.param, **conf)


@KINDS
def test_every_occurrence_runs_although_workers_are_killed(fleet: Fleet) -> None:
    """None early, none left out, none twice but after a kill, and never two chains of an entry."""
    # kombu's filesystem transport loses the messages of a killed worker. So only workers that send
    # due messages to their queue are killed.
    spares = fleet.broker_url.startswith("filesystem")
    queues = ["default", "side", "side"] if spares else [None] * 3
    mortals = [1, 2] if spares else [0, 1, 2]
    # Without acks_late, Celery loses the tasks that a killed worker has just started.
    conf = {"beat_schedule": ENTRIES, "task_acks_late": True}
    workers = [fleet.worker(queues=queue, **conf) for queue in queues]
    killed = []
    for number in range(KILLS):
        sleep(KILL_EVERY_SECONDS)
        place = mortals[number % len(mortals)]
        workers[place].kill()
        killed.append(workers[place].name)
        workers[place] = fleet.worker(queues=queues[place], wait=False, **conf)
    ended = time()

    def all_ran_since() -> bool:
        since = {run.args[0] for run in fleet.record.runs() if due_at(run) > ended}
        return len(since) == len(ENTRIES)

    # kombu may lose the message that a killed worker has just taken from Redis.
    wait_until(all_ran_since, timeout_seconds=2 * PATIENCE_SECONDS)
    by_entry: dict[str, dict[float, list[Run]]] = {name: {} for name in ENTRIES}
    for run in sorted(fleet.record.runs(), key=lambda run: run.started):
        assert run.started >= due_at(run) - EARLY_SECONDS, run
        by_entry[run.args[0]].setdefault(due_at(run), []).append(run)
    for name, by_due in by_entry.items():
        every = ENTRIES[name]["schedule"]
        for runs in by_due.values():
            assert len({run.id for run in runs}) == 1, "two messages of one due time"
            assert all(run.worker in killed for run in runs[:-1]), "twice without a kill"
        for one, other in pairwise(sorted(by_due)):
            steps = (other - one) / every
            assert abs(steps - round(steps)) < 0.2, "a second chain"
            # Catch-up "one": if a run is late, the entry goes on after the start of this run.
            last_skipped = other - every if steps > 1.5 else one
            assert last_skipped <= by_due[one][0].started, "skipped"


@KINDS
def test_workers_that_boot_at_once_publish_each_entry_once(fleet: Fleet) -> None:
    entries = {f"far-{n}": {"task": "note", "schedule": 900.0, "args": [n]} for n in range(10)}
    if fleet.broker_url.startswith("filesystem"):
        # kombu creates its files of exchanges empty, and a second worker fails if it reads one.
        app = fleet.app()
        with app.connection_for_write() as connection:
            for queue in app.amqp.queues.values():
                queue(connection.default_channel).declare()
    workers = [fleet.worker(beat_schedule=entries, pool="solo", wait=False) for _ in range(4)]
    for worker in workers:
        worker.wait_ready()
    app = fleet.app()
    wait_until(lambda: len(list(Delay(app).schedules())) == len(entries))
    assert Delay(app).count() == len(entries)


def test_a_changed_entry_is_published_anew_and_one_that_is_gone_is_removed(fleet: Fleet) -> None:
    def entries(**more: float) -> dict[str, Any]:
        return {name: {"task": "note", "schedule": every} for name, every in more.items()}

    def known() -> dict[str, Any]:
        return {entry.name: entry for entry in delay.schedules()}

    delay = Delay(fleet.app())
    first = fleet.worker(beat_schedule=entries(stays=900.0, changes=900.0, goes=900.0))
    wait_until(lambda: len(known()) == 3)
    stays = known()["stays"]
    fleet.worker(beat_schedule=entries(stays=900.0, changes=960.0))
    wait_until(lambda: len(known()) == 2)
    wait_until(lambda: known()["changes"].schedule == "every 16 min")
    assert known()["stays"] == stays
    assert delay.count() == 2
    assert first.process.poll() is None


@BOTH
def test_an_entry_can_be_paused_resumed_and_run_now(fleet: Fleet) -> None:
    entries = {"tick": {"task": "note", "schedule": 1.0, "args": ["tick"]}}
    fleet.worker(beat_schedule=entries)
    fleet.record.wait_for(2)
    schedules = Delay(fleet.app()).schedules()
    schedules.pause("tick")
    paused_at = len(fleet.record.runs())
    started = monotonic()
    task_id = schedules.run_now("tick")
    fleet.record.wait_for(1, task_id=task_id)
    wait_until(lambda: monotonic() > started + 3)
    assert len(fleet.record.runs()) <= paused_at + 2  # one may have been due as it was paused
    (entry,) = schedules
    assert entry.is_paused
    schedules.resume("tick")
    fleet.record.wait_for(len(fleet.record.runs()) + 2)
    with pytest.raises(KeyError, match="expected the name of a schedule entry, got 'tock'"):
        schedules.pause("tock")


@BOTH
def test_a_cancelled_occurrence_is_followed_by_the_next(fleet: Fleet) -> None:
    fleet.worker(beat_schedule={"tick": {"task": "note", "schedule": 3.0, "args": ["tick"]}})
    fleet.record.wait_for(1)
    delay = Delay(fleet.app())

    def cancelled() -> str | None:  # on a busy machine an occurrence may start meanwhile
        (entry,) = delay.schedules()
        return entry.task_id if entry.task_id and delay.cancel(entry.task_id) else None

    task_id = wait_until(cancelled)
    fleet.record.wait_for(len(fleet.record.runs()) + 1)
    assert task_id not in [run.id for run in fleet.record.runs()]

    def runs_are_counted() -> bool:
        (entry,) = delay.schedules()
        return entry.runs == len(fleet.record.runs())

    wait_until(runs_are_counted)


def test_runs_that_celery_discards_are_told(fleet: Fleet) -> None:
    """They expire behind another task, or no worker knows their task."""
    entries = {
        "hold": {"task": "hold", "schedule": 4.0, "args": [3.9]},
        "stale": {"task": "note", "schedule": 4.0, "options": {"expires": 0.2}},
        "unknown": {"task": "unheard of", "schedule": 4.0},
    }
    fleet.worker(beat_schedule=entries, pool="solo")

    def left_out() -> dict[str, str | None]:
        return {entry.name: entry.left_out for entry in Delay(fleet.app()).schedules()}

    wait_until(lambda: left_out().get("stale") == "it expired before a worker ran it")
    wait_until(lambda: left_out()["unknown"] == "a worker does not know the task unheard of")


def test_a_lost_occurrence_is_published_again(fleet: Fleet, store_redis: PrivateRedis) -> None:
    entries = {"tick": {"task": "note", "schedule": 5.0, "args": ["tick"]}}
    fleet.worker(beat_schedule=entries, tests_overdue_seconds=2, beat_max_loop_interval=1)
    fleet.record.wait_for(1)
    kept = (b"due", b"messages", b"ids")
    lost = [key for key in store_redis.client.scan_iter() if key.endswith(kept)]
    assert store_redis.client.delete(*lost) >= 2
    fleet.record.wait_for(len(fleet.record.runs()) + 2)


def test_a_beat_that_is_started_by_mistake_sends_nothing(fleet: Fleet) -> None:
    """Alone, and embedded in a worker."""
    file = f"--schedule={fleet.folder}/beat"
    alone = fleet.command("beat", f"{file}.db", "--pidfile=", beat_schedule=TICKS)
    worker = fleet.worker(beat_schedule=TICKS, more=("-B", file))
    assert_no_double(fleet.record.wait_for(6))
    for beat in (alone, worker):
        beat.wait_for_log("this beat sends nothing")
        assert not beat.log_lines("Sending due task")


def test_a_worker_of_an_older_release_publishes_the_runs_of_new_entries(fleet: Fleet) -> None:
    far = {"task": "note", "schedule": 900.0}
    fleet.worker(beat_schedule={"old": far}, beat_max_loop_interval=1)
    newer = fleet.worker(beat_schedule=TICKS)
    wait_for_all_ticks(fleet)
    newer.stop()
    assert_no_double(wait_for_all_ticks(fleet))
    assert [entry.name for entry in Delay(fleet.app()).schedules()] == [*TICKS]


def test_two_plain_beats_of_the_same_entries_are_noticed(fleet: Fleet) -> None:
    schedules = Delay(fleet.app()).schedules()
    fleet.worker(beat_schedule=TICKS)
    fleet.record.wait_for(1)
    assert schedules.beat() is None
    fleet.worker(installed=False)
    for name in ("one", "two"):
        files = [f"--schedule={fleet.folder}/{name}", "--pidfile="]
        fleet.command("beat", *files, installed=False, beat_schedule=TICKS)
    wait_until(lambda: schedules.beat() == "note")


@pytest.mark.ci
@on_one_version
def test_occurrences_wait_while_the_store_is_away(vhost_url: str, tmp_path: Path) -> None:
    """At boot, and in between; then each entry goes on, and no due time runs twice."""
    with private_redis() as server:
        conf = {"native_delay_schedules": True, "native_delay_store": server.url}
        with fleet_on(vhost_url, tmp_path, native_delay_levels=FEW_LEVELS, **conf) as fleet:
            server.kill()
            often = {"beat_schedule": TICKS, "beat_max_loop_interval": 2}
            workers = [fleet.worker(wait=False, **often) for _ in range(2)]
            for worker in workers:
                worker.wait_ready()
            assert not fleet.record.runs()
            server.start()
            fleet.record.wait_for(6)
            said = [len(each.log_lines("due tasks wait in")) for each in workers]
            server.kill()
            for worker, before in zip(workers, said, strict=True):
                worker.wait_for_log("due tasks wait in", count=before + 1)
            server.start()
            assert_no_double(wait_for_all_ticks(fleet))


@pytest.mark.ci
def test_entries_go_on_after_a_failover_of_redis(tmp_path: Path) -> None:
    installed(require_redis, "redis")
    with private_sentinel(server="redis") as sentinel:
        options = {"master_name": sentinel.master_name, "visibility_timeout": 5}
        conf = {"native_delay_schedules": True, "broker_transport_options": options}
        with fleet_on(sentinel.url, tmp_path, **conf) as fleet:
            for _ in range(2):
                fleet.worker(beat_schedule=TICKS, tests_overdue_seconds=5, beat_max_loop_interval=2)
            fleet.record.wait_for(6)
            for _ in range(2):
                began = time()
                sentinel.failover()
                ended = time()
                sentinel.heal()
                wait_for_all_ticks(fleet)
                # Replication is asynchronous: the new master may not know the last runs and acks.
                runs = fleet.record.runs()
                unsure = {due_at(run) for run in runs if began - 2 < run.started < ended}
                unsure |= {due_at(run) for run in runs if began - 2 < due_at(run) < ended}
                assert_no_double([run for run in runs if due_at(run) not in unsure])


def due_at(run: Run) -> float:
    return datetime.fromisoformat(run.expires or "").timestamp() - EXPIRES_SECONDS


def assert_no_double(runs: list[Run]) -> None:
    """Assert that no due time ran twice or early, and that no entry has two chains."""
    for name, entry in TICKS.items():
        of_entry = [run for run in runs if run.args == [name]]
        assert all(run.started >= due_at(run) - EARLY_SECONDS for run in of_entry)
        for one, other in pairwise(sorted(map(due_at, of_entry))):
            assert other - one > entry["schedule"] / 2, f"{name} ran twice"


def wait_for_all_ticks(fleet: Fleet) -> list[Run]:
    """Wait until each entry has run twice more."""
    before = len(fleet.record.runs())

    def all_ran() -> bool:
        ran = Counter(run.args[0] for run in fleet.record.runs()[before:])
        return all(ran[name] >= 2 for name in TICKS)

    wait_until(all_ran)
    return fleet.record.runs()
