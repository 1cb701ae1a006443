"""A ledger in streams, as far as it is arithmetic: what is read when, and what then counts."""

from __future__ import annotations

from functools import partial
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay import Query, Waiting
from celery_native_delay.message import Delayed, Replaces
from celery_native_delay.settings import DelaySettings
from celery_native_delay.transports.interface import Answer
from celery_native_delay.transports.rabbitmq.ledger.entry import Entry
from celery_native_delay.transports.rabbitmq.streams.decisions import PENDING_MS, Decisions
from celery_native_delay.transports.rabbitmq.streams.memory import Memory, Place
from celery_native_delay.transports.rabbitmq.streams.names import (
    DECISION_GRACE_SECONDS,
    LedgerStreams,
)
from celery_native_delay.transports.rabbitmq.streams.notes import (
    Decision,
    Mark,
    Note,
    Noted,
    Purge,
    note_message,
    note_of,
)

NOW_MS = 1_000_000_000
NOW_US = NOW_MS * 1000
HOUR_MS = 3_600_000


@given(st.integers(1, 31), st.integers(1, 3_600_000), st.floats(0, 1))
def test_a_stream_reaches_back_as_far_as_anything_in_it_waits(
    levels: int, resolution_ms: int, part: float
) -> None:
    resolution_ms = min(resolution_ms, 300_000_000_000 >> levels) or 1
    settings = DelaySettings(levels=levels, resolution=resolution_ms / 1000, ledger="stream")
    streams = LedgerStreams("set", settings)
    wait_seconds = part * settings.longest_delay_seconds
    assert streams.for_entry(wait_seconds).reach_seconds >= wait_seconds
    remembered_seconds = streams.for_decision(wait_seconds).reach_seconds
    assert remembered_seconds >= wait_seconds + DECISION_GRACE_SECONDS
    for stream in streams.streams:
        assert int(stream.arguments["x-max-age"][:-1]) > stream.reach_seconds


def test_what_waits_for_a_minute_is_not_kept_for_years() -> None:
    streams = LedgerStreams("set", DelaySettings(ledger="stream"))
    kept = [streams.for_entry(seconds).name for seconds in (60, 7_200, 864_000, 1e8)]
    assert kept == ["set.ledger.hour", "set.ledger.day", "set.ledger.month", "set.ledger.years"]


@pytest.mark.parametrize(
    "note",
    [
        Noted("id", 2**52),
        Noted("copy", 2**52, "id"),
        Decision("id", "copy", 2**42, 2**41),
        Mark("token"),
        Purge(),
    ],
)
def test_a_note_is_read_as_it_was_written_and_flat(note: Note) -> None:
    """RabbitMQ 3.10 drops tables and arrays on the way into a stream."""
    headers = note_message(note).properties["application_headers"]
    assert note_of(headers | {"x-stream-offset": 7}) == note
    assert all(isinstance(value, str | int) for value in headers.values())
    later = {name: f"{value[:-1]}2" for name, value in headers.items() if name.endswith("note")}
    assert note_of(headers | later) is None


# ---- what a worker may run -------------------------------------------------------------------


def moved(old: str, new: str, *, old_due_ms: int = NOW_MS, new_due_ms: int = NOW_MS) -> Decision:
    return Decision(old, new, old_due_ms, new_due_ms)


def message(delivery_id: str, replaces: str | None = None, *, age_ms: int = 600) -> Delayed:
    copy_of = None if replaces is None else Replaces(replaces, NOW_MS - age_ms)
    return Delayed(delivery_id, NOW_US, "", "celery", replaces=copy_of)


def test_of_a_message_and_its_copy_one_may_run() -> None:
    """Before the decision, after it, and if none ever comes."""
    decisions = Decisions()
    ask = partial(decisions.answer, now_ms=NOW_MS, is_fresh=True)
    assert ask(message("old")) is Answer.RUN
    assert ask(message("new", "old")) is Answer.NOT_YET
    assert ask(message("new", "old", age_ms=PENDING_MS)) is Answer.DROP
    decisions.add(moved("old", "new"), rank=0, now_ms=NOW_MS)
    assert ask(message("old")) is Answer.DROP
    assert ask(message("new", "old", age_ms=PENDING_MS)) is Answer.RUN
    decisions.add(moved("new", "newer"), rank=0, now_ms=NOW_MS)
    assert ask(message("new", "old")) is Answer.DROP
    assert ask(message("newer", "new")) is Answer.RUN


def test_who_cannot_read_decisions_drops_nothing_but_what_was_decided() -> None:
    """A copy of which the decision was not read may be all that is left of its task."""
    decisions = Decisions()
    ask = partial(decisions.answer, now_ms=NOW_MS, is_fresh=False)
    assert ask(message("old")) is Answer.AWAY
    assert ask(message("new", "old")) is Answer.NOT_YET
    assert ask(message("new", "old", age_ms=PENDING_MS)) is Answer.AWAY
    decisions.add(moved("old", "new"), rank=0, now_ms=NOW_MS)
    assert ask(message("new", "old", age_ms=PENDING_MS)) is Answer.AWAY
    assert ask(message("late", "old", age_ms=PENDING_MS)) is Answer.DROP
    assert ask(message("old")) is Answer.DROP


def test_of_two_who_move_at_once_everybody_sees_the_same_win() -> None:
    """Each stream is read in order, but one may be ahead of the other."""
    first, second, elsewhere = moved("old", "a"), moved("old", "b"), moved("old", "c")
    for ranked in (
        [(1, first), (0, second), (0, elsewhere)],
        [(0, second), (1, first), (0, elsewhere)],
        [(0, second), (0, elsewhere), (1, first)],
    ):
        decisions = Decisions()
        for rank, decision in [*ranked, *ranked]:  # read again after a reconnect
            decisions.add(decision, rank=rank, now_ms=NOW_MS)
        assert decisions.successor("old") == "b"


def test_a_decision_is_forgotten_when_no_message_can_ask_for_it_any_more() -> None:
    decisions = Decisions()
    decisions.add(moved("old", "new", new_due_ms=NOW_MS + HOUR_MS), rank=0, now_ms=NOW_MS)
    grace_ms = DECISION_GRACE_SECONDS * 1000
    decisions.forget(NOW_MS + HOUR_MS + grace_ms - 1)
    assert decisions.successor("old") == "new"
    decisions.forget(NOW_MS + HOUR_MS + grace_ms)
    assert decisions.successor("old") is None


# ---- what is listed --------------------------------------------------------------------------


def entry(task_id: str) -> bytes:
    headers = {"task": "shop.remind", "id": task_id, "argsrepr": "()", "root_id": task_id}
    return Entry({"application_headers": headers}, b"body\nof it", "", "jobs").encoded()


class Reading:
    """A memory, and what it was told, in any order."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.offset = 0

    def reads(self, delivery_id: str, *, due_in: int, replaces: str | None = None) -> None:
        note = Noted(delivery_id, NOW_US + due_in * 1_000_000, replaces)
        self.offset += 1
        self.memory.add(note, entry("task"), Place(2, self.offset), now_us=NOW_US)

    def decides(self, old: str, new: str) -> None:
        self.memory.decide(moved(old, new), rank=0, now_us=NOW_US)

    def listed(self, later: int = 0) -> list[str]:
        page = self.memory.page(offset=0, limit=9, now_us=NOW_US + later * 1_000_000)
        assert page.total == self.memory.count(Query(), now_us=NOW_US + later * 1_000_000)
        return [task.delivery_id for task in page.tasks]


def test_a_moved_task_is_listed_once_in_whichever_order_the_streams_are_read() -> None:
    steps = {
        "old": lambda reading: reading.reads("old", due_in=9),
        "new": lambda reading: reading.reads("new", due_in=5, replaces="old"),
        "decision": lambda reading: reading.decides("old", "new"),
    }
    for order in permutations(steps):
        reading = Reading()
        for step in order:
            steps[step](reading)
            assert len(reading.listed()) <= 1
        assert reading.listed() == ["new"], order
        (found,) = reading.memory.find("task", now_us=NOW_US)
        assert found.task.id == found.task.root_id == "task"


def test_what_is_due_is_not_listed_and_not_kept() -> None:
    reading = Reading()
    for number in (3, 1, 2, -1):
        reading.reads(f"in {number}", due_in=number)
    assert reading.listed() == ["in 1", "in 2", "in 3"]
    edges = [NOW_US + seconds * 1_000_000 for seconds in (0, 2, 3, 4)]
    assert reading.memory.counts(edges, now_us=NOW_US) == [1, 1, 1]
    assert reading.listed(later=2) == ["in 3"]
    assert len(reading.memory) == 1
    assert reading.memory.span(now_us=NOW_US + 3_000_000) is None
    assert reading.memory.find("task", now_us=NOW_US) == []


def test_a_message_that_is_put_back_for_longer_is_listed_once() -> None:
    reading = Reading()
    reading.reads("same", due_in=1)
    assert reading.listed() == ["same"]
    reading.reads("same", due_in=6)
    assert reading.listed() == ["same"]
    assert reading.listed(later=2) == ["same"]


def test_a_purge_forgets_what_stands_before_it_in_its_stream() -> None:
    reading = Reading()
    reading.reads("before", due_in=5)
    reading.memory.purge(3)
    assert reading.listed() == ["before"]
    reading.memory.purge(2)
    reading.reads("after", due_in=5)
    assert reading.listed() == ["after"]


def test_texts_that_many_tasks_have_are_kept_once() -> None:
    reading = Reading()
    reading.reads("a", due_in=1)
    reading.reads("b", due_in=1)
    tasks: tuple[Waiting, ...] = reading.memory.page(offset=0, limit=2, now_us=NOW_US).tasks
    assert tasks[0].name is tasks[1].name
    assert tasks[0].queue is tasks[1].queue
