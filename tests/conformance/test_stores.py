"""A store of waiting tasks in each kind of server: Redis, PostgreSQL, SQLite, MariaDB.

No broker is needed: a publisher in memory stands for it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from threading import Thread
from time import monotonic, time_ns
from typing import Any

import pytest
from redis.connection import AbstractConnection
from sqlalchemy import create_engine, event, inspect, text

from celery_native_delay import Query, Rate, Verdict
from celery_native_delay.errors import NativeDelayError, StoreUnavailable
from celery_native_delay.finding import WRONG
from celery_native_delay.rates.line import Asked, Turn
from celery_native_delay.records.cancelled import note_cancelled, was_cancelled
from celery_native_delay.records.interface import Change, RecordName, Snapshot
from celery_native_delay.records.waiting import WaitingTasks
from celery_native_delay.store.database import now_us as server_time_us
from celery_native_delay.store.dispatcher import Dispatcher
from celery_native_delay.store.entry import StoreEntry
from celery_native_delay.store.interface import (
    BATCH,
    REFUSALS_UNTIL_PARKED,
    Refusal,
    Row,
    Store,
    at_place,
)
from celery_native_delay.store.opened import store_at
from celery_native_delay.testing import private_redis, require_redis
from celery_native_delay.transports.status import refuse_waiting
from pytest_celery_native_delay import installed
from tests.brokers import in_ci
from tests.conformance.brokers import running_database
from tests.conformance.traffic import at_once
from tests.waiting import wait_until

HOUR_US = 3_600_000_000
NAME = RecordName("key", "unique:shop.remind:user:7")


@pytest.fixture(
    scope="module",
    params=[
        "sqlite",
        pytest.param("redis", marks=pytest.mark.redis),
        in_ci("postgresql"),
        in_ci("mariadb"),
    ],
)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "redis":
        installed(require_redis)
        with private_redis() as redis:
            yield redis.url
        return
    with running_database(request.param, tmp_path_factory.mktemp("store")) as url:
        yield url


def opened(url: str, namespace: str) -> Store:
    return store_at(url, namespace, timeout_seconds=10)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """An empty store of a namespace that no other test uses."""
    found = opened(url, f"test{time_ns() % 10**12}")
    yield found
    found.close()


class Broker:
    """A publisher that keeps what it gets, and refuses or fails if told so."""

    def __init__(self) -> None:
        self.published: list[StoreEntry] = []
        self.refuses: set[str] = set()
        self.is_away = False

    def publish(self, entries: Any) -> dict[int, str | None]:
        if self.is_away:
            raise ConnectionError("the broker is away")
        self.published += [entry for entry in entries if entry.task_id not in self.refuses]
        return {
            at: "no such queue" if entry.task_id in self.refuses else None
            for at, entry in enumerate(entries)
        }

    def close(self) -> None: ...

    @property
    def ids(self) -> list[str]:
        return [entry.task_id for entry in self.published]


class Limits:
    """No due time is too far."""

    def check_reach(self, due_us: int) -> None: ...


def now_us() -> int:
    return time_ns() // 1000


def entry(number: int, *, wait_us: int = HOUR_US, **headers: Any) -> StoreEntry:
    own = {"task": "shop.remind", "id": f"order-{number}", "retries": 0, "eta": None, **headers}
    return StoreEntry(
        now_us() + wait_us,
        "shop",
        "orders.new",
        {"application_headers": own, "correlation_id": own["id"]},
        f"body {number}".encode(),
        f"delivery-{number}",
    )


def add(store: Store, *numbers: int, **options: Any) -> None:
    store.add([Row.of(entry(number, **options)) for number in numbers])


def tasks(store: Store) -> WaitingTasks:
    return store.tasks(Limits())


def listed(store: Store) -> list[str]:
    return [task.id for task in tasks(store).page().tasks]


def dispatched(store: Store, broker: Broker | None = None) -> list[str]:
    """Publish all that is due; returns the ids of the published tasks."""
    broker = broker or Broker()
    before = len(broker.ids)
    Dispatcher(store, lambda: broker).publish_due()
    return broker.ids[before:]


def put(store: Store, text: str, name: RecordName = NAME, kept_us: int = HOUR_US) -> None:
    store.state.change(name, lambda seen: Change(text, seen.now_us + kept_us, None))


def counted(seen: Snapshot) -> Change[int]:
    number = int(seen.text or 0) + 1
    return Change(str(number), seen.now_us + HOUR_US, number)


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sql", "redis"):
        monkeypatch.setattr(f"celery_native_delay.store.{module}.LEASE_SECONDS", 0.1)


# ---- messages -------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"=x", b"\0\n\xff", "käse\n\n[]".encode()])
def test_a_task_is_published_as_its_producer_published_it(store: Store, body: bytes) -> None:
    """Whatever bytes its body has, and all other fields."""
    one = entry(1, wait_us=-1, x="\0\ud800")
    fields = [getattr(one, name) for name in one.__dataclass_fields__][:4]
    waits = StoreEntry(*fields, body, "d", "q", 7)
    store.add([Row.of(waits)])
    assert listed(store) == ["order-1"]
    broker = Broker()
    assert dispatched(store, broker) == ["order-1"]
    assert broker.published == [waits]
    assert store.census()[:4] == (0, 0, 0, 0)
    assert listed(store) == []


def test_tasks_are_published_when_they_are_due_earliest_first(store: Store) -> None:
    for number, wait_us in ((3, -1_000_000), (1, -3_000_000), (2, -2_000_000), (4, HOUR_US)):
        add(store, number, wait_us=wait_us)
    assert dispatched(store) == ["order-1", "order-2", "order-3"]
    assert listed(store) == ["order-4"]


def test_the_same_task_and_retry_is_in_the_store_once_however_often_it_is_sent(
    store: Store,
) -> None:
    for wait_us in (HOUR_US, -5, -7):
        add(store, 1, wait_us=wait_us)
    add(store, 1, wait_us=-1, retries=1)
    assert dispatched(store) == ["order-1", "order-1"]


def test_a_batch_of_rows_is_written_all_or_none(store: Store) -> None:
    add(store, *range(BATCH + 100), wait_us=-1)
    assert store.census().waiting == BATCH + 100
    assert len(dispatched(store)) == BATCH + 100


@pytest.mark.parametrize("url", ["sqlite", in_ci("postgresql"), in_ci("mariadb")], indirect=True)
def test_a_prefix_of_another_programs_table_is_refused_and_makes_nothing(url: str) -> None:
    """A shop may have a table ``shop_task``: it is neither read nor called ready."""
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE shop_task (id INTEGER)"))
    prefixed = f"{url}{'&' if '?' in url else '?'}native_delay_prefix=shop_"
    with closing(opened(prefixed, "celery_delay")) as store:
        for call in (store.prepare, lambda: add(store, 1)):
            with pytest.raises(StoreUnavailable, match="shop_task is the table of another program"):
                call()
    with engine.begin() as connection:
        assert not inspect(connection).has_table("shop_record")
        connection.execute(text("DROP TABLE shop_task"))
    engine.dispose()


def test_the_tasks_of_other_virtual_hosts_are_apart_and_can_be_found(
    store: Store, url: str
) -> None:
    own = at_place(store.namespace, "/")
    stores = [opened(url, name) for name in (own, at_place(store.namespace, "b"), store.namespace)]
    stranger = opened(url, at_place(f"{store.namespace}.x", "/"))
    for number, each in enumerate([*stores, stranger]):
        each.prepare()
        add(each, number)
    first, *others = stores
    assert {each.place: listed(each) for each in first.others()} == {
        "b": ["order-1"],
        "": ["order-2"],
    }
    put(others[0], "theirs")
    assert [each.state.read(NAME).text for each in first.others() if each.place] == ["theirs"]
    assert (listed(first), first.state.read(NAME).text) == (["order-0"], None)
    for each in [*stores, stranger]:
        each.clear()
        each.close()


# ---- dispatchers ----------------------------------------------------------------------------


def test_two_dispatchers_never_take_the_same_row(store: Store, url: str) -> None:
    other = opened(url, store.namespace)
    add(store, *range(50), wait_us=-1)
    taken = [store.take(), other.take()]
    assert sorted(len(each.rows) for each in taken) == [0, 50]
    for each, own in zip(taken, (store, other), strict=True):
        own.settle(each, each.rows, ())
    assert store.census().waiting == store.census().taken == 0
    other.close()


def test_rows_that_were_not_published_are_due_again_at_once(store: Store) -> None:
    add(store, 1, 2, wait_us=-1)
    broker = Broker()
    broker.is_away = True
    with pytest.raises(ConnectionError):
        dispatched(store, broker)
    assert sorted(listed(store)) == ["order-1", "order-2"]
    broker.is_away = False
    assert sorted(dispatched(store, broker)) == ["order-1", "order-2"]


def test_rows_of_a_dispatcher_that_died_are_due_when_its_lease_ends(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sql", "redis"):
        monkeypatch.setattr(f"celery_native_delay.store.{module}.LEASE_SECONDS", 2.0)
    add(store, 1, wait_us=-1)
    dead = store.take()
    assert listed(store) == []
    assert store.release() == 0
    assert store.census()[:2] == (0, 1)
    with pytest.raises(NativeDelayError, match="1 message"):  # `delay uninstall` deletes no row
        refuse_waiting(store.where, store.census())
    wait_until(lambda: store.census().waiting > 0)
    assert store.census()[:4] == (1, 0, 0, 1)
    assert store.release() == 1
    assert listed(store) == ["order-1"]
    assert dispatched(store) == ["order-1"]
    store.settle(dead, dead.rows, ())
    assert dispatched(store) == []


def test_a_task_that_is_sent_again_while_a_dispatcher_has_it_waits_again(store: Store) -> None:
    add(store, 1, wait_us=-1)
    taken = store.take()
    add(store, 1)
    store.settle(taken, taken.rows, ())
    assert listed(store) == ["order-1"]


def test_a_refused_task_is_tried_again_then_parked_and_stops_no_other(store: Store) -> None:
    add(store, 1, 2, wait_us=-1)
    broker = Broker()
    broker.refuses.add("order-1")
    assert dispatched(store, broker) == ["order-2"]
    (waits,) = tasks(store).page().tasks
    assert waits.due_us < now_us() + HOUR_US
    for _ in range(REFUSALS_UNTIL_PARKED - 1):
        assert tasks(store).move(["order-1"], lambda task: None)[0]
        taken = store.take()
        (row,) = taken.rows
        again = row._replace(refusals=REFUSALS_UNTIL_PARKED - 1)
        store.settle(taken, (), [Refusal.of(again, "no such queue")])
        if store.census().parked:
            break
    ((parked),) = store.parked(10)
    (waiting,) = store.tasks(None).get("order-1")
    assert waiting.refusal == "no such queue"
    assert (parked.entry.task_id, parked.reason) == ("order-1", "no such queue")
    assert (store.census().waiting, store.census().parked, listed(store)) == (0, 1, [])
    assert dispatched(store, broker) == []
    broker.refuses.clear()
    assert store.release(parked=True) == 1
    assert dispatched(store, broker) == ["order-1"]


def test_the_pause_after_a_refusal_doubles_up_to_an_hour() -> None:
    rows = [(refusals, 1 << refusals) for refusals in range(7)] + [(12, 3600), (30_000, 3600)]
    for refusals, seconds in rows:
        row: Any = type("Row", (), {"refusals": refusals})()
        assert Refusal.of(row, "").pause_us == seconds * 1_000_000


def test_one_dispatcher_leads_and_another_follows_when_it_is_gone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_native_delay.store.interface.LEADING_SECONDS", 0.3)
    assert store.leads("a")
    assert not store.leads("b")
    assert store.leads("a"), "it renews"
    assert store.census().promoting
    wait_until(lambda: store.leads("b"))
    store.resign("a")
    assert store.leads("b")
    store.resign("b")
    assert not store.census().promoting


def test_a_dispatcher_publishes_what_its_own_process_adds_without_delay(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with an earlier due time wakes it, however long it sleeps."""
    monkeypatch.setattr(store, "look_seconds", 3600)
    broker = Broker()
    dispatcher = Dispatcher(store, lambda: broker)
    thread = Thread(target=dispatcher.run)
    thread.start()
    wait_until(lambda: store.census().promoting)
    add(store, 1, wait_us=100_000)
    wait_until(lambda: broker.ids == ["order-1"])
    dispatcher.stop()
    thread.join()
    assert not store.census().promoting


# ---- seeing and changing --------------------------------------------------------------------


def test_a_cancelled_task_is_not_listed_and_is_published_at_once_as_cancelled(store: Store) -> None:
    add(store, 1, 2)
    assert tasks(store).cancel(["order-1"])[0].verdict is Verdict.DONE
    assert tasks(store).cancel(["order-1"])[0].verdict is Verdict.UNKNOWN
    assert (listed(store), tasks(store).count(), store.census().waiting) == (["order-2"], 1, 1)
    broker = Broker()
    assert dispatched(store, broker) == ["order-1"]
    assert broker.published[0].cancelled


def test_due_tasks_do_not_wait_for_the_announcements_of_cancelled_ones(store: Store) -> None:
    add(store, 1, 2)
    assert all(tasks(store).cancel(["order-1", "order-2"]))
    add(store, 3, wait_us=-1)
    taken = [store.take(), store.take()]
    assert [len(each.rows) for each in taken] == [1, 2]
    assert StoreEntry.decoded(taken[0].rows[0].entry).task_id == "order-3"


@pytest.mark.usefixtures("short_leases")
@pytest.mark.parametrize("dies", [False, True], ids=["its broker is away", "its dispatcher died"])
def test_a_cancelled_task_that_was_not_published_stays_cancelled(store: Store, dies: bool) -> None:
    add(store, 1)
    assert tasks(store).cancel(["order-1"])[0]
    taken = store.take()
    assert len(taken.rows) == 1
    if dies:
        wait_until(lambda: store.release() > 0)
    else:
        store.settle(taken, (), ())
    assert (listed(store), store.census().waiting) == ([], 0)
    broker = Broker()
    assert dispatched(store, broker) == ["order-1"]
    assert broker.published[0].cancelled


def test_it_is_too_late_for_a_task_that_a_dispatcher_has_taken(store: Store) -> None:
    add(store, 1, wait_us=-1)
    taken = store.take()
    add(store, 2)
    both = ["order-1", "order-2"]
    for outcomes in (tasks(store).move(both, lambda task: task.due_us), tasks(store).cancel(both)):
        assert [each.verdict for each in outcomes] == [Verdict.TOO_LATE, Verdict.DONE]
    store.settle(taken, taken.rows, ())
    assert tasks(store).cancel(["order-1"])[0].verdict is Verdict.UNKNOWN


def test_of_a_cancel_and_a_dispatcher_at_the_same_time_one_wins(store: Store, url: str) -> None:
    other = opened(url, store.namespace)
    add(store, *range(60), wait_us=-1)
    outcomes: list[Any] = []

    def cancel() -> None:
        for first in range(0, 60, 3):
            ids = [f"order-{first + number}" for number in range(3)]
            outcomes.extend(tasks(other).cancel(ids))

    broker = Broker()
    at_once(lambda number: cancel() if number else dispatched(store, broker), 2)
    dispatched(store, broker)
    cancelled = {each.id for each in outcomes if each}
    assert {one.task_id for one in broker.published if one.cancelled} == cancelled
    assert sorted(broker.ids) == sorted(f"order-{number}" for number in range(60))
    other.close()


def test_counts_and_times_of_many_tasks(store: Store) -> None:
    """Purging then removes what waits, and not what is parked."""
    for number in range(20):
        add(store, number, wait_us=HOUR_US * (number + 1))
    found = tasks(store)
    assert found.count() == 20
    assert found.count(Query(name="shop.remind")) == 20
    assert found.count(Query.parse("order-13")) == 1
    span = found.span()
    assert span is not None
    assert found.counts([span[0], span[1], span[1] + 1]) == [19, 1]
    assert [task.id for task in found.page(offset=5, limit=2).tasks] == ["order-5", "order-6"]
    assert [store.purge(parked=parked) for parked in (True, False)] == [0, 20]
    assert listed(store) == []


@pytest.mark.parametrize("apart_us", [1000, 0])
def test_a_search_misses_no_task_although_earlier_ones_leave_meanwhile(
    store: Store, apart_us: int
) -> None:
    at_us = now_us() + HOUR_US
    store.add([Row.of(entry(number).due_at(at_us + number * apart_us)) for number in range(10)])
    found = tasks(store).all(Query(name="shop.remind"), chunk=3)
    seen = [next(found).id for _ in range(3)]
    assert all(tasks(store).cancel([seen[0], seen[2]]))
    assert {f"order-{number}" for number in range(10)} == {*seen, *(task.id for task in found)}


def test_rows_can_be_read_and_removed_one_after_another(store: Store) -> None:
    """As `delay migrate` does."""
    at_us = now_us() + HOUR_US
    waits = [Row.of(entry(number).due_at(at_us)) for number in range(7)]
    store.add(waits)
    seen, row = [], None
    while rows := store.rows_after(row, limit=3):
        row = rows[-1]
        seen += [StoreEntry.decoded(each.entry).task_id for each in rows]
        assert all(store.remove(each.key, each.entry) for each in rows)
        assert not store.remove(row.key, row.entry)
    assert sorted(seen) == sorted(each.task_id for each in waits)


# ---- state ----------------------------------------------------------------------------------


def test_a_rule_sees_a_state_and_changes_it(store: Store) -> None:
    state = store.state
    assert [state.change(NAME, counted) for _ in range(3)] == [1, 2, 3]
    assert state.load([NAME, RecordName("key", "other")]) == ["3", None]
    state.change(NAME, lambda seen: Change(None, 0, None))
    assert state.load([NAME]) == [None]
    assert state.load([]) == []


def test_names_and_texts_may_be_long_and_in_any_language(store: Store) -> None:
    long = RecordName("key", "鍵\0" * 1000)
    put(store, "値" * 100_000, long)
    assert store.state.load([long]) == ["値" * 100_000]


def test_names_that_differ_in_case_accents_or_trailing_spaces_are_different_names(
    url: str, store: Store
) -> None:
    """A collation of MySQL takes them for one; so does an index that cuts off long names."""
    others = ["Order", "ordér", "order ", "order" + "x" * 300, "order" + "x" * 301]
    every = ["order", *others]
    for task_id in every:
        store.add([Row.of(replace(entry(1, id=task_id), delivery_id=task_id))])
        put(store, json.dumps({"id": task_id}), RecordName("key", task_id))
    assert sorted(listed(store)) == sorted(every)
    for task_id in every:
        seen = store.state.read(RecordName("key", task_id))
        assert (seen.text, len(seen.messages)) == (json.dumps({"id": task_id}), 1)
    assert tasks(store).cancel(["order"])[0]
    assert sorted(listed(store)) == sorted(others)
    with closing(opened(url, store.namespace.upper())) as other:
        assert listed(other) == []


@pytest.mark.parametrize("url", [in_ci("mariadb")], indirect=True)
def test_the_time_of_a_server_is_right_while_its_local_clock_repeats_an_hour(url: str) -> None:
    engine = create_engine(url)
    told = []
    for at in (datetime(2026, 10, 25, hour, 30, tzinfo=UTC) for hour in (0, 1)):
        with engine.connect() as connection:
            connection.execute(text(f"SET timestamp = {at.timestamp()}"))
            assert str(connection.execute(text("SELECT now()")).scalar())[11:16] == "02:30"
            told.append(datetime.fromtimestamp(server_time_us(connection) / 1e6, UTC) - at)
    engine.dispose()
    assert told == [timedelta(0)] * 2


def test_a_state_that_is_kept_no_longer_is_none(store: Store) -> None:
    put(store, "over", kept_us=-5_000_000)
    wait_until(lambda: store.state.load([NAME]) == [None])
    assert store.state.change(NAME, lambda seen: Change("new", seen.now_us, seen.text)) is None


def test_concurrent_changes_of_one_state_are_not_lost(store: Store, url: str) -> None:
    def count_up(_: int) -> None:
        with closing(opened(url, store.namespace)) as own:
            for _ in range(25):
                own.state.change(NAME, counted)

    at_once(count_up)
    assert store.state.load([NAME]) == ["100"]


def test_concurrent_starts_at_two_rates_are_each_counted_at_both(store: Store, url: str) -> None:
    rates = {"shop.call": Rate("10/h", burst=10), "shop.all": Rate("1000/h", burst=100)}
    asked = [Asked(name, "ada", rate) for name, rate in rates.items()]
    turns: list[Turn] = []

    def start(_: int) -> None:
        with closing(opened(url, store.namespace)) as own, closing(own.lines()) as lines:
            turns.extend(lines.ask(asked) for _ in range(5))

    at_once(start)
    assert sum(turn.starts for turn in turns) == 10
    assert sorted(turn.place for turn in turns if turn.place is not None) == [*range(10, 20)]
    with closing(store.lines()) as lines:
        told = {line.task: line for line in lines.look(10)}
        asked_for = lines.look_at(["shop.all\nada", "gone"], store.now_us())
    assert asked_for == [told["shop.all"]]
    assert [(told[name].waiting, told[name].starts_last_period) for name in sorted(told)] == [
        (0, 10),
        (10, 10),
    ]


def test_states_that_expire_last_are_listed_first(store: Store) -> None:
    for number in (2, 1, 3):
        put(store, "x", RecordName("rate", str(number)), kept_us=number * HOUR_US)
    _, found = store.state.latest("rate", 2)
    assert [name for name, _ in found] == ["3", "2"]


def test_a_task_cancelled_in_the_broker_is_known_until_its_message_has_come(store: Store) -> None:
    note_cancelled(store.state, "order-1", kept_us=HOUR_US)
    assert [was_cancelled(store.state, "order-1") for _ in range(2)] == [True, True]
    assert not was_cancelled(store.state, "order-2")


def keyed(state_after: str, number: int) -> tuple[Any, Any]:
    """A rule that replaces the key's task by another one, and the other one's row."""

    def decide(seen: Snapshot) -> Change[int]:
        return Change(state_after, seen.now_us + HOUR_US, len(seen.messages), now_us(), True)

    def publish(due_us: int, delivery_id: str, ahead_us: int) -> Row:
        return Row.of(entry(number).due_at(due_us))

    return decide, publish


def test_a_key_and_its_task_change_in_one_step(store: Store) -> None:
    for number in (1, 2, 3):
        decide, publish = keyed(json.dumps({"id": f"order-{number}"}), number)
        assert store.state.change(NAME, decide, publish) == (number > 1)
    assert store.state.read(NAME).text == '{"id": "order-3"}'
    assert [member for member, _ in store.state.read(NAME).messages] != []
    assert dispatched(store) == ["order-3"]
    assert store.state.read(NAME).messages == ()


def test_a_key_does_not_replace_a_task_that_a_dispatcher_has_taken(store: Store) -> None:
    decide, publish = keyed('{"id": "order-1"}', 1)
    store.state.change(NAME, decide, publish)
    taken = store.take()
    decide, publish = keyed('{"id": "order-2"}', 2)
    assert store.state.change(NAME, decide, publish) == 0
    store.settle(taken, taken.rows, ())
    assert dispatched(store) == ["order-2"]


def test_of_concurrent_changes_each_sees_the_text_that_it_replaces(store: Store, url: str) -> None:
    """So what replaced tasks have collected is neither lost nor doubled."""

    def collect(number: int) -> None:
        own, seen_texts = opened(url, store.namespace), [""]
        decide, _ = keyed(f'{{"id": "order-{number}"}}', number)

        def looking(seen: Snapshot) -> Change[int]:
            later = replace(decide(seen), due_us=now_us() + HOUR_US)
            return replace(later, look=lambda texts: seen_texts.__setitem__(0, "".join(texts)))

        def publish(due_us: int, delivery_id: str, ahead_us: int) -> Row:
            text = seen_texts[0].partition("\n")[2] + f" {number}"
            return Row.of(replace(entry(number).due_at(due_us), body=text.encode()))

        own.state.change(NAME, looking, publish)
        own.close()

    at_once(collect, 12)
    (row,) = store.rows_after(None, limit=5)
    body = StoreEntry.decoded(row.entry).body.decode()
    assert sorted(map(int, body.split())) == [*range(12)]


# ---- killed in between each step ----------------------------------------------------------------


def killed_before(step: int, url: str, namespace: str, work: Callable[[Store], None]) -> bool:
    """Run *work* in a process that kills itself before this step; False if it has fewer steps.

    A step is a command to the Redis, or a statement or a commit in the database.
    """
    child = os.fork()
    if child == 0:  # no exception may leave this block
        try:
            steps, send = count(), AbstractConnection.send_packed_command

            def begin(*_: Any) -> None:
                if next(steps) == step:
                    os.kill(os.getpid(), signal.SIGKILL)

            def begin_and_send(connection: Any, *command: Any, **options: Any) -> None:
                begin()
                send(connection, *command, **options)

            AbstractConnection.send_packed_command = begin_and_send
            store: Any = opened(url, namespace)
            if hasattr(store, "engine"):
                event.listen(store.engine, "before_cursor_execute", begin)
                event.listen(store.engine, "commit", begin)
            work(store)
            os._exit(0)
        finally:
            os._exit(1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, -signal.SIGKILL)
    return ended != 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_process_killed_in_between_any_steps_has_replaced_all_or_nothing(url: str) -> None:
    """Either the old task waits under the old state, or the new one under the new state."""
    old, new = '{"id": "order-1"}', '{"id": "order-2"}'

    def replace_old(store: Store) -> None:
        store.state.change(NAME, *keyed(new, 2))

    found = []
    for step in count():
        namespace = f"killed{step}-{time_ns() % 10**12}"
        store = opened(url, namespace)
        store.state.change(NAME, *keyed(old, 1))
        was_killed = killed_before(step, url, namespace, replace_old)
        found.append((store.state.read(NAME).text, dispatched(store)))
        assert found[-1] in ((old, ["order-1"]), (new, ["order-2"]))
        store.close()
        if not was_killed:
            break
    assert found[-1] == (new, ["order-2"])
    assert step > 2


@pytest.mark.usefixtures("short_leases")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_dispatcher_killed_in_between_any_steps_loses_nothing(url: str) -> None:
    for step in count():
        namespace = f"killed{step}-{time_ns() % 10**12}"
        store = opened(url, namespace)
        add(store, 1, wait_us=-1)
        read, write = os.pipe()

        def publish(own: Store, write: int = write) -> None:
            class Pipe(Broker):
                def publish(self, entries: Any) -> dict[int, str | None]:
                    os.write(write, b"x" * len(entries))
                    return dict.fromkeys(range(len(entries)))

            Dispatcher(own, Pipe).publish_due()

        was_killed = killed_before(step, url, namespace, publish)
        os.close(write)
        came = len(os.read(read, 10))
        os.close(read)
        while store.census().taken:
            store.release()
        came += len(dispatched(store))
        assert came == 1 or (was_killed and came == 2)
        store.close()
        if not was_killed:
            break


# ---- a store that is away ---------------------------------------------------------------------


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "sqlite:////no/such/folder/store.db"])
def test_an_unreachable_store_raises_in_a_bounded_time(url: str) -> None:
    store = store_at(url, "test", timeout_seconds=5)
    began = monotonic()
    for call in (
        lambda: add(store, 1),
        lambda: store.state.read(NAME),
        lambda: listed(store),
        store.take,
        store.census,
    ):
        with pytest.raises(StoreUnavailable, match=r"the store at .* does not work"):
            call()
    (finding, *_) = store.findings()
    assert (finding.check, finding.level) == ("store", WRONG)
    assert monotonic() - began < 60
    with suppress(StoreUnavailable):
        store.close()


def answers(store: Store) -> bool:
    with suppress(StoreUnavailable):
        return store.census().waiting > 0
    return False


@pytest.mark.parametrize("url", [in_ci("postgresql"), in_ci("mariadb")], indirect=True)
def test_a_change_that_its_caller_gave_up_under_another_sessions_lock_never_happens(
    url: str,
) -> None:
    """And no thread waits for the lock for long."""
    engine = create_engine(url)
    with closing(opened(url, "locked")) as store, ExitStack() as stack:
        stack.callback(engine.dispose)
        add(store, 1, 2)
        before = [(task.id, task.due_us) for task in tasks(store).page().tasks]
        (first, _) = store.rows_after(None, limit=2)
        brief = stack.enter_context(closing(store_at(url, "locked", timeout_seconds=0.5)))
        wait_until(lambda: answers(brief))
        within: Any = brief._within  # type: ignore[attr-defined]
        locked = text("SELECT id FROM native_delay_task FOR UPDATE")
        with engine.begin() as other:
            other.execute(locked)
            for change in (
                lambda: tasks(brief).cancel(["order-1"]),
                lambda: tasks(brief).move(["order-2"], lambda task: None),
                lambda: brief.remove(first.key, first.entry),
            ):
                with pytest.raises(StoreUnavailable):
                    change()
        # The calls get their locks now, and go on.
        wait_until(lambda: within._idle.qsize() == within._count)
        with engine.begin() as other:
            other.execute(locked)
            with pytest.raises(StoreUnavailable):
                tasks(brief).cancel(["order-1"])
            wait_until(lambda: within._idle.qsize() == within._count)
        assert [(task.id, task.due_us) for task in tasks(store).page().tasks] == before


@pytest.mark.parametrize("url", ["sqlite", in_ci("postgresql"), in_ci("mariadb")], indirect=True)
def test_a_claim_is_given_once(store: Store) -> None:
    state: Any = store.state
    answers = [state.claim(RecordName("claim", "order-1"), kept_us=HOUR_US) for _ in range(3)]
    assert answers == [True, False, False]
