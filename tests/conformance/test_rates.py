"""Rates per key on every broker: the start times that the tasks recorded are checked."""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from time import time
from typing import Any

import pytest

from celery_native_delay import Delay, Rate, Waiting
from celery_native_delay.keyed.record import HEADER as UNIQUE
from celery_native_delay.keyed.record import LOCKS
from celery_native_delay.message import HEADER, ONCE
from celery_native_delay.schedules.state import HEADER as OCCURRENCE
from celery_native_delay.worker.rating import PLACE
from tests.acceptance.test_unique import children_of, phases, spans
from tests.acceptance.worker import FEW_LEVELS, Fleet, Run, fleet_on
from tests.brokers import ON_SYSTEM, in_ci
from tests.conformance.brokers import needs_store, options_of, settings_of
from tests.lines import LOOKED_AT, most_in_a_window
from tests.waiting import SLOWNESS, wait_until

BROKERS = [
    pytest.param(ON_SYSTEM.id, marks=pytest.mark.rabbitmq),
    pytest.param("redis", marks=pytest.mark.redis),
    "filesystem",
]

also_on_sqs = pytest.mark.parametrize(
    "broker", [*BROKERS, in_ci("sqs")], indirect=True, scope="session"
)

#: What the two kinds of store keep. The other tests show how each broker puts messages back.
in_both_stores = pytest.mark.parametrize(
    "broker",
    [pytest.param("redis", marks=pytest.mark.redis), in_ci("rabbitmq-4.3")],
    indirect=True,
    scope="session",
)

#: Files of one millisecond have no order, nor have messages that a consumer polls from folders.
in_order = pytest.mark.parametrize("broker", BROKERS[:2], indirect=True, scope="session")

RATE = Rate("40/4s", key="tenant")


def conf_of(url: str, new_store: Callable[[str], str]) -> dict[str, Any]:
    """The configuration of an app whose broker, or a store beside it, counts rates."""
    conf = {f"native_delay_{name}": value for name, value in settings_of(url).items()}
    conf |= {"broker_transport_options": options_of(url), "native_delay_levels": FEW_LEVELS}
    return conf | ({"native_delay_store": new_store(url)} if needs_store(url) else {})


@pytest.fixture
def fleet(url: str, tmp_path: Path, new_store: Callable[[str], str]) -> Iterator[Fleet]:
    with fleet_on(url, tmp_path, **conf_of(url, new_store)) as fleet:
        yield fleet


def rated(limit: str, key: str | None = None, burst: int = 1) -> dict[str, Any]:
    return {"limit": limit, "key": key, "burst": burst}


def by_tenant(runs: list[Run]) -> dict[str, list[float]]:
    found = defaultdict(list)
    for run in runs:
        found[run.args[0] if run.args else "bob"].append(run.started)
    return found


@also_on_sqs
def test_the_rate_holds_in_every_window_although_a_worker_is_killed(fleet: Fleet) -> None:
    """The rate is used up, and one tenant's tasks do not delay another's."""
    rates = {"native_delay_rates": {"call_api": rated(RATE.limit, "tenant")}}
    app = fleet.app(**rates)
    workers = [fleet.worker(name=name, **rates) for name in ("one", "two")]
    ids = [app.send_task("call_api", ("ada", number)).id for number in range(60)]
    few = [app.send_task("call_api", (), {"tenant": "bob"}).id for _ in range(3)]
    fleet.record.wait_for_ids(few)
    fleet.record.wait_for(15, name="call_api")
    workers[0].kill()
    # The killed worker's tasks are redelivered later, on Redis after an hour.
    fleet.record.wait_for(len(ids) + len(few) - 20, name="call_api")
    starts = by_tenant(fleet.record.runs(name="call_api"))
    assert most_in_a_window(starts["ada"], LOOKED_AT * RATE.period_us / 1_000_000) <= RATE.count
    span = max(starts["ada"]) - min(starts["ada"])
    assert span >= LOOKED_AT * (len(starts["ada"]) - 1) * RATE.spacing_us / 1_000_000


@in_both_stores
def test_waiting_tasks_move_when_the_rate_of_their_key_is_set(fleet: Fleet) -> None:
    """Within seconds and in their order, and other keys keep their rate."""
    rates = {"native_delay_rates": {"call_api": rated("1/h", "tenant")}}
    app = fleet.app(**rates)
    delay = Delay(app)
    ids = [app.send_task("call_api", ("gold", number)).id for number in range(21)]
    app.send_task("call_api", ("ada",))
    app.send_task("call_api", ("ada",))
    fleet.worker(concurrency=1, **rates)
    wait_until(lambda: delay.count("name:call_api") == 21)
    assert delay.set_rate("call_api", "gold", "20/s") == 20
    began = time()
    # The start before the change counts in no window of one second after it.
    runs = fleet.record.wait_for_ids(ids)
    assert time() - began < 30 * SLOWNESS
    starts = [runs[each][0].started for each in ids]
    assert most_in_a_window(starts, LOOKED_AT) <= 20
    lines = {line.key: line for line in delay.rates()}
    assert (lines["gold"].rate, lines["gold"].overridden) == ("20/s", True)
    assert (lines["ada"].rate, lines["ada"].overridden) == ("1/h", False)
    assert delay.count("name:call_api") == 1
    # The lower limit counts the starts before the change.
    assert delay.set_rate("call_api", "gold", None) == 0
    assert not [line for line in delay.rates() if line.overridden]
    app.send_task("call_api", ("gold",))
    wait_until(lambda: delay.count("name:call_api") == 2)
    (next_us,) = [line.next_slot_us for line in delay.rates() if line.key == "gold"]
    assert next_us is not None
    assert next_us > (time() + 1800) * 1e6


def test_a_redelivered_task_whose_process_was_killed_gets_its_lock_again(fleet: Fleet) -> None:
    """At once, although a lease would last a minute."""
    rates = {"native_delay_rates": {"mortal": {"concurrent": 1}}}
    app = fleet.app(**rates)
    fleet.worker(concurrency=1, **rates)
    mortal = app.send_task("mortal").id
    first, second = wait_until(lambda: runs if len(runs := fleet.record.runs()) == 2 else None)
    assert first.id == second.id == mortal
    assert second.started - first.started < 30 * SLOWNESS


@in_both_stores
def test_at_most_two_tasks_of_a_key_run_at_a_time_although_a_worker_is_killed(fleet: Fleet) -> None:
    """On all workers; others wait in the broker. A killed worker's leases expire."""
    rates = {"native_delay_rates": {"alone": {"limit": "20/s", "key": "key", "concurrent": 2}}}
    rates |= {"tests_lease_seconds": 10}  # instead of a minute
    app = fleet.app(**rates)
    workers = [fleet.worker(name=name, concurrency=3, **rates) for name in ("one", "two")]
    for _ in range(40):
        app.send_task("alone", ("a", 0.3))
    others = [app.send_task("alone", ("b", 0.3)).id for _ in range(4)]

    def ended() -> int:
        return sum(each["phase"] == "ends" for each in phases(fleet))

    fleet.record.wait_for_ids(others)
    wait_until(lambda: ended() >= 10)
    pool = children_of(workers[0].process.pid)
    workers[0].kill()
    killed, before = dict.fromkeys(pool, time()), ended()
    wait_until(lambda: ended() >= before + 12)
    wait_until(lambda: len(phases(fleet)) % 2 == 0 or None)
    workers[1].stop()
    found = {
        key: max(sum(begin <= at < end for begin, end in runs) for at, _ in runs)
        for key, runs in spans(fleet, killed).items()
    }
    assert found["a"] == 2
    assert found["b"] <= 2


@in_both_stores
def test_several_limits_hold_although_a_worker_is_killed(fleet: Fleet) -> None:
    """Each tenant's limit, and the limit that all tenants share; each task runs."""
    limits = [rated("32/4s", "tenant"), rated("40/4s", burst=3) | {"name": "all"}]
    rates = {"native_delay_rates": {"call_api": limits}}
    app = fleet.app(**rates)
    workers = [fleet.worker(name=name, **rates) for name in ("one", "two")]
    ids = [app.send_task("call_api", ("ada", number)).id for number in range(40)]
    ids += [app.send_task("call_api", (), {"tenant": "bob"}).id for _ in range(10)]
    fleet.record.wait_for(15, name="call_api")
    workers[0].kill()
    # The killed worker's tasks are redelivered later, on Redis after an hour.
    fleet.record.wait_for(len(ids) - 25, name="call_api")
    starts = by_tenant(fleet.record.runs(name="call_api"))
    assert all(most_in_a_window(each, LOOKED_AT * 4) <= 32 for each in starts.values())
    assert most_in_a_window([*starts["ada"], *starts["bob"]], LOOKED_AT * 4) <= 42
    assert {line.task for line in Delay(app).rates()} == {"call_api", "all"}


@in_both_stores
def test_tasks_of_different_names_share_a_rate_by_its_name(fleet: Fleet) -> None:
    """Their tasks wait in one queue, and a RetryAfter of one task stops the others."""
    shared = rated("40/4s") | {"name": "stripe"}
    rates = {"native_delay_rates": {"call_api": shared, "turned_away": shared}}
    app = fleet.app(**rates)
    ids = [app.send_task("call_api", ("ada", number)).id for number in range(15)]
    ids += [app.send_task("turned_away", (0.1, 0)).id for _ in range(15)]
    fleet.worker(concurrency=1, **rates)
    runs = fleet.record.wait_for_ids(ids)
    starts = [run.started for each in runs.values() for run in each]
    assert most_in_a_window(starts, LOOKED_AT * RATE.period_us / 1_000_000) <= RATE.count
    # The first task may start late without delaying the others. Two rates would take half as long.
    shortest_us = 29 * RATE.spacing_us - RATE.catch_up_us
    assert max(starts) - min(starts) >= shortest_us / 1_000_000
    (line,) = Delay(app).rates()
    assert (line.task, line.key) == ("stripe", None)


def test_other_tasks_run_while_rate_limited_ones_wait(fleet: Fleet) -> None:
    """On one worker process with a prefetch of 1."""
    rates = {"native_delay_rates": {"call_api": "10/h"}, "worker_prefetch_multiplier": 1}
    app = fleet.app(**rates)
    for number in range(50):
        app.send_task("call_api", ("ada", number))
    ids = [app.send_task("note", (number,)).id for number in range(20)]
    fleet.worker(concurrency=1, **rates)
    runs = fleet.record.wait_for_ids(ids)
    assert {len(runs[each]) for each in ids} == {1}
    wait_until(lambda: Delay(app).count("name:call_api") == 49)
    assert len(fleet.record.runs(name="call_api")) == 1
    (line,) = Delay(app).rates()
    assert (line.task, line.key, line.waiting, line.starts_last_period) == ("call_api", None, 49, 1)


def test_malformed_messages_neither_end_a_worker_nor_hold_up_other_keys(fleet: Fleet) -> None:
    """A task whose key cannot be encoded counts without a key; forged places are ignored."""
    limits = [rated("1000/s", "tenant"), {"name": "all", "key": "tenant", "concurrent": 50}]
    conf = {"native_delay_rates": {"call_api": limits}, "native_delay_schedules": True}
    app = fleet.app(**conf)
    worker = fleet.worker(concurrency=1, **conf)
    places = '{{"call_api\\nada": {0}, "all\\nada": {0}}}'
    mark = {"v": 1, "kind": "unique", "key": "\ud800", "until": "start"}
    occurrence = {"v": 1, "entry": "\ud800", "number": 1}
    hostile = [
        app.send_task("call_api", ("\ud800",)),
        app.send_task("call_api", ("a\0b",)),
        app.send_task("call_api", ("ada",), headers={PLACE: places.format("9" * 30)}),
        app.send_task("call_api", ("ada",), headers={PLACE: places.format(9 * 10**15)}),
        app.send_task("call_api", ("ada",), headers={PLACE: [1]}),
        app.send_task("call_api", ("ada",), headers={HEADER: {"v": 1, "due": "soon"}}),
        app.send_task("call_api", ("ada",), headers={UNIQUE: mark}),
        app.send_task("call_api", ("ada",), headers={LOCKS: [["\ud800", "a"], 5]}),
        app.send_task("call_api", ("ada",), headers={OCCURRENCE: occurrence}),
        app.send_task("call_api", ("ada",), headers={ONCE: "\ud800/0/a"}),
        app.send_task("call_api", ("\ud800",), countdown=1),
    ]
    ids = [each.id for each in hostile]
    ids += [app.send_task("call_api", ("bob", number)).id for number in range(20)]
    runs = fleet.record.wait_for_ids(ids)
    assert {len(runs[each]) for each in ids} == {1}
    assert worker.process.poll() is None
    assert worker.log_lines("call_api", "cannot compute the rate key", "without lone surrogates")
    waits = worker.log_lines("wait until the rates can be read")
    slow = ("no answer within", "did not answer the worker a moment ago")  # a busy machine
    assert not [line for line in waits if not any(each in line for each in slow)]


@in_order
def test_one_worker_starts_the_tasks_of_a_rate_in_order(fleet: Fleet) -> None:
    """Except for messages that a busy broker delivers late."""
    rates = {"native_delay_rates": {"call_api": "40/s"}}
    app = fleet.app(**rates)
    ids = [app.send_task("call_api", ("ada", number)).id for number in range(100)]
    fleet.worker(concurrency=1, **rates)
    fleet.record.wait_for_ids(ids)
    order = [run.args[1] for run in fleet.record.runs(name="call_api")]
    in_order: list[int] = []  # its length is the number of tasks that started in order
    for number in order:
        at = bisect(in_order, number)
        in_order[at : at + 1] = [number]
    assert len(order) - len(in_order) <= 5, order


@in_both_stores
def test_tasks_behind_a_retry_after_are_shown_due_when_it_ends(fleet: Fleet) -> None:
    """Although their messages come back to the worker before."""
    rates = {"native_delay_rates": {"turned_away": "4/m"}}
    app = fleet.app(**rates)
    for _ in range(4):
        app.send_task("turned_away", (60.0,))
    fleet.worker(concurrency=1, **rates)
    delay = Delay(app)

    wait_until(lambda: [line for line in delay.rates() if line.held_until_us] or None)
    held_until_us = delay.rates()[0].held_until_us
    assert held_until_us is not None

    def in_line() -> list[Waiting] | None:
        tasks = [task for task in delay.ls() if task.place]
        return tasks if len(tasks) >= 3 else None

    tasks = wait_until(in_line)
    assert all(task.due_us >= held_until_us for task in tasks)
    assert delay.show(tasks[0].id)[0].due_us >= held_until_us
    (limit,) = (said for said in delay.story(tasks[0].id) if said.startswith("limited by"))
    assert limit.startswith("limited by turned_away 4/m, ")
    assert " wait, held until 20" in limit


@in_order
def test_a_retry_after_holds_all_tasks_of_its_rate(fleet: Fleet) -> None:
    """The task that raised it starts first again."""
    rates = {"native_delay_rates": {"turned_away": "2/s"}}
    app = fleet.app(**rates)
    fleet.worker(concurrency=1, **rates)
    first = app.send_task("turned_away", (2.0,)).id
    fleet.record.wait_for(1)
    wait_until(lambda: [line for line in Delay(app).rates() if line.held_until_us] or None)
    others = [app.send_task("turned_away", (2.0, 0)).id for _ in range(5)]
    fleet.record.wait_for(7)
    runs = fleet.record.runs(name="turned_away")
    assert [run.id for run in runs[:2]] == [first, first]
    assert runs[1].started - runs[0].started >= 2.0 * LOOKED_AT
    assert sorted(run.id for run in runs) == sorted([first, first, *others])
