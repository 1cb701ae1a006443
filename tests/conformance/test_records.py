"""The records in both backends: Redis and a database."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Thread
from time import monotonic, time_ns
from typing import Any

import pytest
from redis.connection import AbstractConnection
from sqlalchemy import event

from celery_native_delay.errors import RecordsUnavailable
from celery_native_delay.fence.in_records import Runs
from celery_native_delay.fence.run import ABORTED, ALL, COMMITTED, OPEN
from celery_native_delay.fence.run import Record as Run
from celery_native_delay.records.interface import (
    UNDECIDED,
    Change,
    CompareAndSet,
    IndexEntry,
    MessageState,
    RecordName,
    Snapshot,
)
from celery_native_delay.records.opened import records_at
from celery_native_delay.testing import private_redis, require_redis
from pytest_celery_native_delay import installed
from tests.brokers import in_ci
from tests.postgresql import find_postgresql, private_postgresql
from tests.waiting import wait_until

HOUR_US = 3_600_000_000
NAME = RecordName("key", "unique:shop.remind:user:7")


@pytest.fixture(
    scope="module",
    params=["sqlite", pytest.param("redis", marks=pytest.mark.redis), in_ci("postgresql")],
)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('records')}/records.db"
    elif request.param == "redis":
        installed(require_redis)
        with private_redis() as redis:
            yield redis.url
    else:
        installed(find_postgresql)
        with private_postgresql() as postgresql:
            yield postgresql.new_database()


@pytest.fixture
def records(url: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Empty records of a namespace that no other test uses."""
    found = records_at(url, f"test{time_ns() % 10**12}")
    yield found
    found.close()


def now_us() -> int:
    return time_ns() // 1000


def listed(number: int, *, wait_us: int = HOUR_US) -> IndexEntry:
    return IndexEntry(
        f"order-{number}:delivery-{number}", now_us() + wait_us, f'["entry {number}"]'
    )


def note(records: Any, *numbers: int) -> list[str]:
    for number in numbers:
        records.note(listed(number))
    records.flush()
    return [listed(number).member for number in numbers]


@pytest.mark.parametrize("bad", ["\0", "\ud800"], ids=["NUL", "lone surrogate"])
def test_a_task_id_that_no_database_takes_costs_no_other_task_its_entry(
    bad: str, records: Any
) -> None:
    others = [listed(number) for number in range(40)]
    for number, other in enumerate(others):
        if number in (10, 30):
            records.note(other._replace(member=f"order-{bad}:bad-{number}"))
        records.note(other)
    records.flush()
    states = [records.state_of(other.member) for other in others]
    assert states == [MessageState.KNOWN] * 40


def put(records: Any, text: str) -> None:
    records.change(NAME, lambda seen: Change(text, seen.now_us + HOUR_US, None))


def test_a_rule_sees_a_record_and_changes_it(records: Any) -> None:
    seen: list[Any] = []

    def count(looked: Snapshot) -> Change[int]:
        seen.append(looked.text)
        assert abs(looked.now_us - now_us()) < 60_000_000
        number = int(looked.text or 0) + 1
        return Change(str(number), looked.now_us + HOUR_US, number)

    assert [records.change(NAME, count) for _ in range(3)] == [1, 2, 3]
    assert seen == [None, "1", "2"]
    assert records.load([NAME, RecordName("key", "other"), RecordName("run", NAME.name)]) == [
        "3",
        None,
        None,
    ]
    records.change(NAME, lambda seen: Change(None, 0, None))
    assert records.load([NAME]) == [None]
    assert records.load([]) == []


def test_names_and_texts_may_be_long_and_in_any_language(records: Any) -> None:
    long = RecordName("key", "ключ\n" * 500)
    records.change(long, lambda seen: Change("値" * 100_000, seen.now_us + HOUR_US, None))
    assert records.load([long]) == ["値" * 100_000]


def test_a_record_that_is_kept_no_longer_is_none(records: Any) -> None:
    records.change(NAME, lambda seen: Change("over", seen.now_us - 5_000_000, None))
    deadline = monotonic() + 10
    while records.load([NAME]) != [None] and monotonic() < deadline:
        pass
    assert records.change(NAME, lambda seen: Change("new", seen.now_us, seen.text)) is None


def test_concurrent_changes_of_one_record_are_not_lost(records: Any, url: str) -> None:
    """Four threads change a record that does not exist at first."""

    def count(seen: Snapshot) -> Change[None]:
        return Change(str(int(seen.text or 0) + 1), seen.now_us + HOUR_US, None)

    def work() -> None:
        for _ in range(25):
            records.change(NAME, count)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert records.load([NAME]) == ["100"]


def test_records_that_expire_last_are_listed_first(records: Any) -> None:
    for number in (2, 3, 1):
        records.change(
            RecordName("rate", f"line {number}"),
            lambda seen, number=number: Change("{}", seen.now_us + number * HOUR_US, None),
        )
    at_us, found = records.latest("rate", 2)
    assert found == [("line 3", "{}"), ("line 2", "{}")]
    assert abs(at_us - now_us()) < 60_000_000


def test_a_noted_message_may_run_once_received(records: Any) -> None:
    (member,) = note(records, 1)
    assert records.state_of(member) is MessageState.KNOWN
    assert records.received(member) is True
    assert records.state_of(member) is MessageState.UNKNOWN
    # Redelivered, or never noted, for example while the records were away.
    assert records.received(member) is True
    assert records.missed == 0


def test_a_message_that_was_not_sent_is_forgotten(records: Any) -> None:
    (member,) = note(records, 1)
    records.forget(member)
    records.flush()
    assert records.state_of(member) is MessageState.UNKNOWN


def test_a_replaced_message_is_void_and_its_replacement_runs(records: Any) -> None:
    (old,) = note(records, 1)
    new = listed(2)
    records.look(None, "delivery-2", 60_000)
    assert records.state_of(new.member) is MessageState.KNOWN
    assert records.compare_and_set(CompareAndSet(new=new, gone=[old]))
    assert records.state_of(old) is MessageState.VOID
    assert records.state_of(new.member) is MessageState.KNOWN
    assert records.received(old) is False
    assert records.received(old) is False  # redelivered
    assert records.received(new.member) is True


@pytest.mark.parametrize("dies_after", ["the mark", "the publish"])
def test_a_process_that_dies_before_its_compare_and_set_changes_nothing(
    records: Any, dies_after: str
) -> None:
    """A message that it has published is void, and the old message runs."""
    (old,) = note(records, 1)
    records.look(None, "delivery-2", 60_000)
    if dies_after == "the publish":
        assert records.received("order-1:delivery-2") is False
        # The process is alive after all, but too late.
        assert not records.compare_and_set(CompareAndSet(new=listed(2), gone=[old]))
    assert records.received(old) is True


def test_a_message_that_a_worker_received_cannot_be_replaced(records: Any) -> None:
    (old,) = note(records, 1)
    records.look(None, "delivery-2", 60_000)
    assert records.received(old) is True
    assert not records.compare_and_set(CompareAndSet(new=listed(2), gone=[old]))
    assert records.received(listed(2).member) is False


def test_the_copy_that_announces_a_cancel_is_delivered_and_not_listed(records: Any) -> None:
    (old,) = note(records, 1)
    records.look(None, "delivery-2", 60_000)
    new = IndexEntry("order-1:delivery-2", now_us(), "")
    assert records.compare_and_set(CompareAndSet(new=new, gone=[old]))
    assert records.state_of(new.member) is MessageState.UNKNOWN
    assert records.received(new.member) is True


def test_record_and_message_change_in_one_step(records: Any) -> None:
    (old,) = note(records, 1)
    text = json.dumps({"id": "order-1"})
    put(records, text)
    looked = records.look(NAME, "delivery-2", 60_000)
    assert looked.text == text
    ((member, due_us),) = looked.messages
    assert member == old
    assert 0 < due_us - looked.now_us <= HOUR_US
    new, after = listed(2), json.dumps({"id": "order-2"})
    step = CompareAndSet(NAME, text, after, 60_000, new, [old])
    put(records, text + " ")  # another was quicker
    assert not records.compare_and_set(step)
    assert records.received(new.member) is False
    assert records.state_of(old) is MessageState.KNOWN

    put(records, text)
    records.look(NAME, "delivery-2", 60_000)
    assert records.compare_and_set(step)
    assert records.load([NAME]) == [after]
    assert [member for member, _ in records.look(NAME, None, 0).messages] == [new.member]
    assert records.received(old) is False
    assert records.received(new.member) is True
    assert records.look(NAME, None, 0).messages == ()


def test_a_rule_publishes_a_message_with_its_record_and_replaces_the_one_before(
    records: Any,
) -> None:
    published: list[str] = []

    def publish(due_us: int, delivery_id: str, ahead_us: int) -> IndexEntry:
        assert abs(ahead_us) < 60_000_000
        published.append(f"order-1:{delivery_id}")
        return IndexEntry(published[-1], due_us, "entry")

    def decide(seen: Snapshot) -> Change[int]:
        text, due_us = json.dumps({"id": "order-1", "at": seen.now_us}), seen.now_us + HOUR_US
        return Change(text, due_us, len(seen.messages), due_us, replaces=True)

    assert [records.change(NAME, decide, publish) for _ in range(3)] == [0, 1, 1]
    assert [records.received(member) for member in published] == [False, False, True]
    assert records.read(NAME).messages == ()


# ---- killed in between each step ----------------------------------------------------------------


def killed_before(
    step: int, url: str, owner: str, work: Callable[[Any, Callable[..., None]], None]
) -> bool:
    """Run *work* in a process that kills itself before this step; False if it has fewer steps.

    A step is a command to the Redis, or a statement or a commit in the database. *work* tells of
    steps of its own.
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
            records = records_at(url, owner)
            if hasattr(records, "engine"):
                event.listen(records.engine, "before_cursor_execute", begin)
                event.listen(records.engine, "commit", begin)
            work(records, begin)
            os._exit(0)
        finally:
            os._exit(1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, -signal.SIGKILL)
    return ended != 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_process_killed_in_between_any_steps_has_replaced_all_or_nothing(
    url: str, tmp_path: Path
) -> None:
    """Either the old message runs, or the new message with the new state; never both or none."""
    before, after = (json.dumps({"id": "order-1", "at": at}) for at in ("before", "after"))
    found = []
    for step in count():
        owner, broker = f"killed{step}-{time_ns() % 10**12}", tmp_path / f"published-{step}"
        records = records_at(url, owner)
        (old,) = note(records, 1)
        put(records, before)

        def replace_old(records: Any, begin: Callable[..., None], broker: Path = broker) -> None:
            def publish(due_us: int, delivery_id: str, _: int) -> IndexEntry:
                begin()
                broker.write_text(f"order-1:{delivery_id}")
                return IndexEntry(broker.read_text(), due_us, "entry")

            def decide(seen: Snapshot) -> Change[None]:
                due_us = seen.now_us + HOUR_US
                return Change(after, due_us, None, due_us, replaces=True)

            records.change(NAME, decide, publish)

        was_killed = killed_before(step, url, owner, replace_old)
        new = broker.read_text() if broker.exists() else None
        runs = [member for member in (old, new) if member and records.received(member)]
        found.append((runs == [new], records.load([NAME])[0]))
        assert found[-1] == (True, after) or (runs == [old] and found[-1] == (False, before))
        records.close()
        if not was_killed:
            break
    # The mark, the publish and the compare-and-set are three steps at least.
    assert len(found) > 3
    assert found[0] == (False, before)
    assert found[-1] == (True, after)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("state", ["listed", "void", "undecided"])
def test_a_message_has_one_answer_although_the_worker_that_asks_is_killed(
    url: str, state: str
) -> None:
    """RabbitMQ redelivers the message, and the next worker asks again."""
    for step in count():
        owner = f"asks{step}-{time_ns() % 10**12}"
        records = records_at(url, owner)
        (member,) = note(records, 1)
        if state == "void":
            records.look(None, "delivery-2", 60_000)
            assert records.compare_and_set(CompareAndSet(new=listed(2), gone=[member]))
        elif state == "undecided":
            member = listed(2).member
            records.look(None, "delivery-2", 60_000)
        was_killed = killed_before(
            step, url, owner, lambda records, _, member=member: records.received(member)
        )
        assert records.received(member) is (state == "listed")
        records.close()
        if not was_killed:
            break
    assert step > 0


def test_a_mark_that_was_taken_back_leaves_no_trace(records: Any) -> None:
    records.look(None, "delivery-1", 60_000)
    records.unmark("delivery-1", 30_000)
    assert records.state_of("order-1:delivery-1") is MessageState.KNOWN
    records.unmark("delivery-1")
    assert records.state_of("order-1:delivery-1") is MessageState.UNKNOWN
    assert records.received("order-1:delivery-1") is True


def test_old_entries_are_swept_and_waiting_ones_are_purged(records: Any) -> None:
    records.note(listed(1, wait_us=-2 * 86_400_000_000))
    records.note(listed(2, wait_us=-60_000_000))
    note(records, 3)
    assert records.sweep() == 1
    records.purge()
    standings = [records.state_of(listed(number).member) for number in (1, 2, 3)]
    assert standings == [MessageState.UNKNOWN, MessageState.KNOWN, MessageState.UNKNOWN]


def test_namespaces_share_no_records(records: Any, url: str) -> None:
    other = records_at(url, "other")
    (member,) = note(records, 1)
    put(records, "mine")
    assert other.load([NAME]) == [None]
    assert other.state_of(member) is MessageState.UNKNOWN
    other.close()


def test_healthy_records_have_no_fault_that_loses_something(records: Any) -> None:
    assert [each for each in records.findings() if "answer" in each.problem] == []


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1/0", "sqlite:////no/such/folder/records.db"], indirect=False
)
def test_unreachable_records_cost_a_bounded_time(url: str) -> None:
    records = records_at(url, "test")
    started = monotonic()
    for number in range(100):
        records.note(listed(number))
    assert records.received(listed(1).member) is None
    with pytest.raises(RecordsUnavailable, match=r"records at .* unreachable"):
        records.load([NAME])
    (finding,) = records.findings()
    assert "does not answer" in finding.problem
    assert monotonic() - started < 60
    assert records.missed > 0
    records.close()


def test_a_received_message_whose_mark_is_undecided_becomes_void(records: Any) -> None:
    """The process that marked it can no longer decide otherwise."""
    records.look(None, "delivery-2", 60_000)
    assert UNDECIDED
    assert records.received("order-2:delivery-2") is False
    assert records.state_of("order-2:delivery-2") is MessageState.VOID


def test_a_rule_that_keeps_the_text_keeps_the_expiry(records: Any) -> None:
    """Reading a record by a rule neither shortens nor extends its life."""
    brief_us = 1_500_000
    records.change(NAME, lambda seen: Change("same", seen.now_us + brief_us, None))
    records.change(NAME, lambda seen: Change(seen.text, seen.now_us + HOUR_US, None))
    wait_until(lambda: records.load([NAME]) == [None])


# ---- fenced runs --------------------------------------------------------------------------------

BEGUN = Run(OPEN, 1000.25, deadline=1060.0, jobs=("j",))
DONE = Run(COMMITTED, 1009.0, winners={"0": "1-b"}, by="the driver")


def test_a_fenced_run_is_sealed_once(records: Any) -> None:
    """The first caller wins, and decides how long the record is kept."""
    runs = Runs(records)
    assert runs.load(["r/1:é", "other"]) == [None, None]
    assert runs.open("r/1:é", BEGUN, kept_seconds=1000, job="j") == BEGUN
    assert runs.load(["other", "r/1:é"]) == [None, BEGUN]
    done = replace(DONE, jobs=BEGUN.jobs)
    assert runs.seal("r/1:é", DONE, kept_seconds=500) == done
    for late in (Run(ABORTED, 1010), Run(ALL, 1010), DONE):
        assert runs.seal("r/1:é", late, kept_seconds=0.001) == done
    assert runs.open("r/1:é", BEGUN, kept_seconds=0.001, job="k") == done
    assert runs.load(["r/1:é"]) == [done]


def test_a_fenced_run_expires(records: Any) -> None:
    runs = Runs(records)
    runs.seal("r", DONE, kept_seconds=0.5)
    wait_until(lambda: runs.load(["r"]) == [None])


def test_of_concurrent_seals_of_a_run_one_wins(records: Any) -> None:
    """A caller that opens the run meanwhile gets the winner's record."""
    runs = Runs(records)
    runs.open("r", BEGUN, kept_seconds=1000, job="j")
    found: list[Run] = []

    def seal(number: int) -> None:
        found.append(runs.seal("r", Run(ABORTED, 0, by=f"w{number}"), kept_seconds=1000))
        found.append(runs.open("r", BEGUN, kept_seconds=1000, job="j"))

    threads = [Thread(target=seal, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len({run.by for run in found}) == 1
