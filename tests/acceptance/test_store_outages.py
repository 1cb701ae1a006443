"""Workers on RabbitMQ with a store that hangs, restarts, cuts connections, or is out of reach."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

import pytest

from celery_native_delay import Debounce, Delay, StoreUnavailable, install
from celery_native_delay.records.interface import Change, RecordName
from celery_native_delay.records.waiting import RUN
from celery_native_delay.store import database
from celery_native_delay.store.interface import Store
from celery_native_delay.store.opened import store_at
from celery_native_delay.testing import PrivateRedis, private_redis
from celery_native_delay.within import MOST_AT_ONCE
from tests.acceptance.worker import Fleet
from tests.brokers import in_ci, on_one_version
from tests.hanging import hung
from tests.integration.test_store_dispatching import away, space_of
from tests.postgresql import PrivatePostgreSQL, end_backends, private_postgresql
from tests.proxy import Proxy, connected
from tests.waiting import PATIENCE_SECONDS, wait_until


class Place:
    """A server in which tasks wait, behind a proxy, and its faults."""

    def __init__(self, server: PrivateRedis | PrivatePostgreSQL, folder: Path) -> None:
        self.server = server
        listener = socket.socket(socket.AF_UNIX)
        if isinstance(server, PrivateRedis):
            path, behind = folder / "redis.sock", server.socket
            self.direct_url, self.url = server.url, f"redis+socket://{path}"
        else:
            self.direct_url = server.new_database()
            path, behind = folder / ".s.PGSQL.5432", server.socket
            self.url = self.direct_url.replace(str(behind.parent), str(folder))
        listener.bind(str(path))
        listener.listen(100)
        self.proxy = Proxy(listener, lambda: connected(behind))

    def hung(self) -> AbstractContextManager[None]:
        return hung(self.server)

    @contextmanager
    def swallowed(self) -> Iterator[None]:
        """Lose what is sent, on open connections for ever and on new ones until the end."""
        self.proxy.swallows = True
        yield
        self.proxy.swallows = False

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Make each answer take longer than a worker's consumer waits, and a command."""
        self.proxy.delay_seconds = 3
        yield
        self.proxy.delay_seconds = 0

    def cut_idle(self) -> None:
        """Close all connections, as a load balancer does with idle ones."""
        if isinstance(self.server, PrivateRedis):
            self.server.client.client_kill_filter(_type="normal", skipme=True)
        else:
            end_backends(self.direct_url)

    def restart(self) -> None:
        self.server.kill()
        self.server.start()


@pytest.fixture(scope="module")
def running() -> Iterator[Callable[[str], Any]]:
    """Returns the server of a kind, which these tests share; starts it at the first call."""
    with ExitStack() as stack:
        private: dict[str, Any] = {"redis": private_redis, "postgresql": private_postgresql}
        yield cache(lambda kind: stack.enter_context(private[kind]()))


@pytest.fixture(params=["redis", in_ci("postgresql")])
def place(
    request: pytest.FixtureRequest, running: Callable[[str], Any], short_path: Path
) -> Iterator[Place]:
    server = running(request.param)
    if isinstance(server, PrivateRedis):
        server.client.flushall()
    place = Place(server, short_path)
    yield place
    place.proxy.close()


@pytest.fixture
def fleet(vhost_url: str, place: Place, new_fleet: Callable[..., Fleet]) -> Fleet:
    conf = {"native_delay_store": place.url, "native_delay_store_timeout_seconds": 2}
    return new_fleet(vhost_url, **conf)


def ask(delay: Delay) -> None:
    """Make a call whose arguments are collected."""
    pages = delay._app.signature("pages", (1,))
    delay.debounce(pages, key="seen", seconds=3600, collect=9)


def asked(delay: Delay) -> int:
    """The number of calls that the waiting task has collected."""
    (task,) = delay.ls("key:seen")
    return task.kwargs.count("{...}")


def raises_in_time(call: Callable[[], object]) -> None:
    began = monotonic()
    with pytest.raises(StoreUnavailable):
        call()
    assert monotonic() - began < PATIENCE_SECONDS


def later(fleet: Fleet, number: int, seconds: float) -> str:
    return str(fleet.app().tasks["note"].apply_async((number,), countdown=seconds).id)


FAULTS = [
    ("redis", Place.hung),
    in_ci("postgresql", Place.hung),
    in_ci("postgresql", Place.swallowed),
    in_ci("postgresql", Place.delayed),
]

#: Longer than the test waits for anything, so that a worker that waited so long would fail it.
#: After lost packets, a call whose time is over has to end before its row can be published.
WORKERS_TIMEOUT_SECONDS = 2 * PATIENCE_SECONDS


@on_one_version
@pytest.mark.parametrize(("place", "fault"), FAULTS, indirect=["place"])
def test_a_store_that_hangs_stops_no_worker(
    fleet: Fleet, place: Place, fault: Callable[[Place], Any]
) -> None:
    """Immediate tasks run and the worker answers; tasks that need the store run later, once."""
    timeout_seconds = 2 if fault is Place.swallowed else WORKERS_TIMEOUT_SECONDS
    timeout = {"native_delay_store_timeout_seconds": timeout_seconds}
    worker = fleet.worker(native_delay_rates={"call_api": "100/s"}, **timeout)
    app = fleet.app()
    delay = Delay(app)
    ask(delay)
    first = later(fleet, 0, 1)
    fleet.record.wait_for(task_id=first)
    gated = [app.send_task("call_api", ("ada",)).id]
    fleet.record.wait_for_ids(gated)
    waiting = later(fleet, 1, 2)
    with fault(place):
        calls: list[Callable[[], Any]] = [
            lambda: ask(delay),
            lambda: delay.cancel(waiting),
            delay.next_due,
            lambda: later(fleet, 2, 60),
        ]
        for call in calls:
            raises_in_time(call)
        # More than the worker takes at once.
        gated += [app.send_task("call_api", ("ada",)).id for _ in range(20)]
        gated.append(app.send_task("note", ("run",), headers={RUN: "nightly"}).id)
        now = [app.send_task("note", (number,)).id for number in range(10)]
        fleet.record.wait_for_ids(now)
        answers = app.control.inspect(timeout=PATIENCE_SECONDS, limit=1).ping()
        assert answers == {worker.name: {"ok": "pong"}}
        for task_id in (waiting, gated[-1]):
            assert fault is Place.delayed or not fleet.record.runs(task_id=task_id)
    fleet.record.wait_for_ids([waiting, *gated])
    again = later(fleet, 3, 1)
    fleet.record.wait_for(task_id=again)
    assert len(fleet.record.runs(task_id=waiting)) == 1
    ask(delay)
    assert asked(delay) in (2, 3), "a call that raised may have been made"


@on_one_version
def test_a_worker_that_boots_in_an_outage_starts_no_held_task(fleet: Fleet, place: Place) -> None:
    app = fleet.app()
    delay = Delay(app)
    delay.hold("note")
    held = app.send_task("note", (1,)).id
    timeout = {"native_delay_store_timeout_seconds": WORKERS_TIMEOUT_SECONDS}
    with place.hung():
        worker = fleet.worker(wait=False, **timeout)
        worker.wait_for_log("Connected to")
    other = app.send_task("careful").id
    fleet.record.wait_for(task_id=other)
    wait_until(lambda: delay.show(held))
    assert not fleet.record.runs(task_id=held)


def test_a_worker_started_before_its_store_dispatches_later(fleet_at: Callable[..., Fleet]) -> None:
    fleet = fleet_at("filesystem")
    task_id = later(fleet, 1, 1)
    with away(space_of(fleet.broker_url) / "delays.db"):
        worker = fleet.worker(queues="default")
        assert worker.log_lines("delays.db does not work", "it does not answer yet")
        assert not worker.log_lines("native delay is OFF")
        worker.wait_for_log("due tasks wait in", "next attempt in")
    fleet.record.wait_for(1, task_id=task_id)
    worker.wait_for_log("are published again")


@on_one_version
@pytest.mark.parametrize("fault", [Place.cut_idle, Place.restart], ids=["cut", "restarted"])
def test_after_a_cut_or_a_restart_each_publish_waits_and_can_be_cancelled(
    fleet: Fleet, place: Place, fault: Callable[[Place], Any]
) -> None:
    """The first publish of each producer after it, too."""
    fleet.worker()
    app = fleet.app()
    delay = Delay(app)
    kept, dropped = [later(fleet, 0, 3)], [later(fleet, 1, 3)]
    ask(delay)
    fault(place)
    kept.append(wait_until(lambda: answered(lambda: later(fleet, 2, 3))))  # a server that starts
    ask(delay)
    assert asked(delay) == 2
    dropped.append(later(fleet, 3, 3))
    for task_id in dropped:
        assert delay.cancel(task_id)
    fleet.record.wait_for_ids(kept)
    marker = later(fleet, 4, 2)
    fleet.record.wait_for(task_id=marker)
    assert {run.id for run in fleet.record.runs()} == {*kept, marker}


#: What an operator or a producer asks for.
CHANGES: dict[str, Callable[[Delay, str], Any]] = {
    "reschedule": lambda delay, task_id: delay.reschedule(task_id, countdown=7200),
    "move": lambda delay, task_id: delay.reschedule_all([task_id], by=7200),
    "update": lambda delay, task_id: delay.update(task_id, args=[7], queue="celery"),
    "add": lambda delay, _: delay.schedules().add("added", "note", "every 1 h", [1]),
    "change": lambda delay, _: delay.schedules().change("there", schedule="every 2 h"),
    "remove": lambda delay, _: delay.schedules().remove("there"),
    "key": lambda delay, _: delay._app.tasks["call_api"].delay("ada"),
    "hold": lambda delay, _: delay.hold("other"),
    "show": lambda delay, task_id: delay.show(task_id),
    "story": lambda delay, task_id: delay.story(task_id),
}


def state_of(delay: Delay) -> dict[str, Any]:
    entries = {each.name: (each.schedule, each.is_paused) for each in delay.schedules()}
    tasks = sorted((task.name, task.args, task.due_us) for task in delay.ls())
    return {"entries": entries, "tasks": tasks, "holds": [hold.name for hold in delay.holds()]}


@on_one_version
@pytest.mark.ci
def test_each_change_ends_in_time_while_the_store_hangs(fleet: Fleet, place: Place) -> None:
    """It does nothing by halves, and works later, also after a cut or a restart of the store."""
    fleet.conf["native_delay_schedules"] = True
    app = fleet.app()
    install(app, keys={"call_api": Debounce("tenant", seconds=3600)})
    delay = Delay(app)
    delay.schedules().add("there", "note", "every 1 h", [0])
    task_id = later(fleet, 0, 3600)
    before = state_of(delay)
    with place.hung():
        for change in CHANGES.values():
            raises_in_time(partial(change, delay, task_id))
    assert wait_until(lambda: answered(lambda: state_of(delay))) == before
    place.cut_idle()
    wait_until(lambda: answered(lambda: bool(delay.show(task_id))))
    place.restart()
    assert wait_until(lambda: answered(lambda: state_of(delay))) == before
    for name, change in CHANGES.items():
        change(delay, task_id)
        after = state_of(delay)
        assert (after != before) is (name not in ("show", "story")), name
        before = after


def answered(call: Callable[[], Any]) -> Any:
    with suppress(StoreUnavailable):
        return call()
    return None


def test_calls_whose_packets_are_lost_end_and_the_store_answers_again(place: Place) -> None:
    """More such calls than have threads."""
    store = store_at(place.url, "shop", timeout_seconds=0.2)
    wait_until(lambda: answers(store))
    with place.swallowed():
        for _ in range(2 * MOST_AT_ONCE):
            with pytest.raises(StoreUnavailable):
                store.census()
    wait_until(lambda: answers(store))
    store.close()


@pytest.mark.parametrize("place", [in_ci("postgresql")], indirect=True)
def test_a_process_that_is_frozen_in_a_transaction_keeps_nothing_locked(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a locked row take all threads of another process, which asks for other rows."""
    limits = database._LIMITS.replace("5000", "100").replace("30000", "4000")
    monkeypatch.setattr(database, "_LIMITS", limits)
    name = RecordName("lead", "")
    frozen, goes_on = Event(), Event()

    def decide(snapshot: Any) -> Change[bool]:
        frozen.set()
        goes_on.wait(PATIENCE_SECONDS)
        return Change(answer=True, text="1", kept_us=1 << 61)

    stores = [store_at(place.url, "shop", timeout_seconds=PATIENCE_SECONDS) for _ in range(2)]
    one, other = stores

    def write(store: Store, text: str) -> bool:
        return store.state.change(name, lambda _: Change(answer=True, text=text, kept_us=1 << 61))

    write(one, "0")
    thread = Thread(target=answered, args=(lambda: one.state.change(name, decide),))
    thread.start()
    frozen.wait(PATIENCE_SECONDS)

    def changed() -> bool | None:
        return answered(lambda: write(other, "2"))

    assert changed() is None
    for _ in range(2 * MOST_AT_ONCE):
        changed()
    assert answers(other)
    wait_until(changed)
    goes_on.set()
    thread.join()
    assert other.state.read(name).text == "2"
    for store in stores:
        store.close()


def answers(store: Store) -> bool:
    return answered(store.census) is not None
