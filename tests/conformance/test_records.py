"""The promises of the records, held by both backends: Redis, and a database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from threading import Thread
from time import monotonic, time_ns
from typing import Any

import pytest

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
    """Empty records, of an owner of this test alone."""
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


def put(records: Any, text: str) -> None:
    records.change(NAME, lambda seen: Change(text, seen.now_us + HOUR_US, None))


def test_a_record_is_changed_by_a_rule_that_sees_it(records: Any) -> None:
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


def test_callers_that_change_one_record_at_the_same_time_lose_nothing(
    records: Any, url: str
) -> None:
    """From four threads, and of a record that is not there at first."""

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


def test_the_records_that_are_kept_longest_are_listed_first(records: Any) -> None:
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


def test_a_message_that_was_replaced_must_not_run_and_the_new_one_may(records: Any) -> None:
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
def test_a_process_that_dies_before_it_decides_has_changed_nothing(
    records: Any, dies_after: str
) -> None:
    """The message that it may have published is void, and the old one runs."""
    (old,) = note(records, 1)
    records.look(None, "delivery-2", 60_000)
    if dies_after == "the publish":
        assert records.received("order-1:delivery-2") is False
        # Alive after all, and too late.
        assert not records.compare_and_set(CompareAndSet(new=listed(2), gone=[old]))
    assert records.received(old) is True


def test_a_replacement_comes_too_late_for_a_message_that_was_received(records: Any) -> None:
    (old,) = note(records, 1)
    records.look(None, "delivery-2", 60_000)
    assert records.received(old) is True
    assert not records.compare_and_set(CompareAndSet(new=listed(2), gone=[old]))
    assert records.received(listed(2).member) is False


def test_a_cancelled_message_counts_and_is_not_listed(records: Any) -> None:
    (old,) = note(records, 1)
    records.look(None, "delivery-2", 60_000)
    new = IndexEntry("order-1:delivery-2", now_us(), "")
    assert records.compare_and_set(CompareAndSet(new=new, gone=[old]))
    assert records.state_of(new.member) is MessageState.UNKNOWN
    assert records.received(new.member) is True


def test_record_and_message_change_together_or_not_at_all(records: Any) -> None:
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


def test_a_mark_that_was_taken_back_leaves_no_trace(records: Any) -> None:
    records.look(None, "delivery-1", 60_000)
    records.unmark("delivery-1", 30_000)
    assert records.state_of("order-1:delivery-1") is MessageState.KNOWN
    records.unmark("delivery-1")
    assert records.state_of("order-1:delivery-1") is MessageState.UNKNOWN
    assert records.received("order-1:delivery-1") is True


def test_entries_of_lost_messages_are_swept_and_what_waits_is_purged(records: Any) -> None:
    records.note(listed(1, wait_us=-2 * 86_400_000_000))
    records.note(listed(2, wait_us=-60_000_000))
    note(records, 3)
    assert records.sweep() == 1
    records.purge()
    standings = [records.state_of(listed(number).member) for number in (1, 2, 3)]
    assert standings == [MessageState.UNKNOWN, MessageState.KNOWN, MessageState.UNKNOWN]


def test_owners_never_meet(records: Any, url: str) -> None:
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
def test_records_that_are_away_hold_nobody_up(url: str) -> None:
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


def test_an_undecided_mark_is_no_secret(records: Any) -> None:
    """A worker that receives such a message makes it void for good."""
    records.look(None, "delivery-2", 60_000)
    assert UNDECIDED
    assert records.received("order-2:delivery-2") is False
    assert records.state_of("order-2:delivery-2") is MessageState.VOID


def test_a_record_whose_text_stays_is_kept_as_long_as_before(records: Any) -> None:
    """Whoever looks at it with a rule neither shortens nor prolongs its life."""
    brief_us = 1_500_000
    records.change(NAME, lambda seen: Change("same", seen.now_us + brief_us, None))
    records.change(NAME, lambda seen: Change(seen.text, seen.now_us + HOUR_US, None))
    wait_until(lambda: records.load([NAME]) == [None])


# ---- fenced runs --------------------------------------------------------------------------------

BEGUN = Run(OPEN, 1000.25, deadline=1060.0, jobs=("j",))
DONE = Run(COMMITTED, 1009.0, winners={"0": "1-b"}, by="the driver")


def test_a_run_is_sealed_once(records: Any) -> None:
    """By whoever comes first, and its record is kept for as long as that one said."""
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


def test_a_run_whose_time_is_over_is_lost(records: Any) -> None:
    runs = Runs(records)
    runs.seal("r", DONE, kept_seconds=0.5)
    wait_until(lambda: runs.load(["r"]) == [None])


def test_of_all_who_seal_a_run_at_once_one_does(records: Any) -> None:
    """And whoever opens it meanwhile is told which one."""
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
