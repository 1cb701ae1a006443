"""The rules of debounce, throttle and unique as pure functions, and the result of such a call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from typing import Any

import pytest
from celery import Celery
from celery.result import EagerResult
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay import KeyedResult, TopologyMismatch
from celery_native_delay.app.keyed import EagerKeyedResult, keyed_result
from celery_native_delay.keyed import rules
from celery_native_delay.keyed.record import HEADER, Mark, Record, Run, name_of
from celery_native_delay.keyed.rules import (
    BELIEVED_US,
    LEASE_US,
    Rule,
    Seen,
    Step,
    begin,
    carry,
    debounce,
    end,
    let_go,
    receive,
    release,
    renew,
    throttle,
    unique,
)

SECOND = 1_000_000


@dataclass
class Place:
    """A broker in memory: one record, and the waiting messages."""

    now_us: int = 100 * SECOND
    record: Record | None = None
    waiting: dict[str, int] = field(default_factory=dict)
    ran: dict[str, int] = field(default_factory=dict)

    def at(self, seconds: float) -> Place:
        """Set the clock to *seconds* after the beginning; due tasks run."""
        self.now_us = round((100 + seconds) * SECOND)
        for task_id, due_us in list(self.waiting.items()):
            if due_us <= self.now_us:
                self.ran[task_id] = self.waiting.pop(task_id)
        return self

    def call(self, rule: Rule) -> Step:
        stands = self.record.id if self.record else None
        waiting = ((stands, self.waiting[stands]),) if stands in self.waiting else ()
        step = rule(Seen(self.now_us, self.record, waiting))
        if step.replaces:
            del self.waiting[str(stands)]
        self.record = step.record
        return step

    def send(self, new_id: str, rule: Rule) -> str:
        """Call *rule*, publish its task if it says so, and return the key's task id."""
        step = self.call(rule)
        if step.due_us is not None:
            assert step.kept_us > step.due_us
            self.waiting[new_id] = step.due_us
        return step.stands or new_id

    def debounce(self, new_id: str, quiet: float, longest: float | None = None) -> str:
        quiet_us = round(quiet * SECOND)
        longest_us = None if longest is None else round(longest * SECOND)
        rule = partial(debounce, new_id=new_id, quiet_us=quiet_us, longest_us=longest_us)
        return self.send(new_id, rule)

    def throttle(self, new_id: str, window: float, *, trails: bool) -> str:
        window_us = round(window * SECOND)
        return self.send(
            new_id, partial(throttle, new_id=new_id, window_us=window_us, trails=trails)
        )

    def unique(self, new_id: str, wait: float = 0) -> str:
        return self.send(new_id, partial(unique, new_id=new_id, wait_us=round(wait * SECOND)))

    def carry(self, task_id: str, there: Place) -> str:
        """Move *task_id* from *there* to here; returns the id of the task for the key here."""
        known = there.record or Record()
        rule = partial(carry, task_id=task_id, known=known, due_us=there.waiting[task_id])
        stands = self.send(task_id, rule)
        if stands == task_id:
            there.call(partial(let_go, task_id=task_id))
            del there.waiting[task_id]
        return stands

    def move(self, task_id: str, seconds: float) -> None:
        """Reschedule a waiting task to *seconds* from now."""
        self.waiting[task_id] = self.now_us + round(seconds * SECOND)

    def cancel(self, task_id: str) -> None:
        """Cancel a waiting task, as a user does and a worker announces."""
        del self.waiting[task_id]
        self.call(partial(release, task_id=task_id))

    @property
    def started(self) -> list[tuple[str, float]]:
        return [(name, round(at_us / SECOND - 100, 6)) for name, at_us in self.ran.items()]


# ---- debounce -----------------------------------------------------------------------------------


def test_debounce_does_not_replace_a_task_that_is_due() -> None:
    """Without a promoter a due task still waits. Replaced again and again, it would never run."""
    place = Place()
    place.at(0).debounce("a", 1)
    place.now_us += 2 * SECOND
    place.debounce("b", 1)
    assert set(place.waiting) == {"a", "b"}


def test_a_debounce_that_collects_is_due_at_once_when_it_is_full() -> None:
    collect = partial(rules.debounce, quiet_us=10, most_calls=3)
    seen, dues = Seen(0, None), list[object]()
    for number in range(4):
        step = collect(seen, f"task-{number}", call_id=f"call-{number}")
        assert step.record is not None
        assert collect(Seen(1, step.record), "x", call_id=f"call-{number}").stands, "tried again"
        dues.append((step.due_us, step.replaces, step.record.calls))
        seen = Seen(number + 1, step.record, (("m", step.due_us or 0),))
    assert dues == [(10, False, 1), (11, True, 2), (2, True, 3), (13, False, 1)]
    full = Record(id="full", calls=3)
    step = collect(Seen(5, full, (("m", 90),)), "next", call_id="next")
    assert (step.replaces, step.record) == (False, Record("next", 15, 5, opener="next", calls=1)), (
        "it waits for its retry, which a call would bring forward with one more call each time"
    )


def test_debounce_starts_over_after_its_task_was_cancelled() -> None:
    place = Place()
    place.at(0).debounce("a", 5, longest=6)
    place.waiting.clear()
    place.at(4).debounce("b", 5, longest=6)
    assert place.at(60).started == [("b", 9)]


@given(
    st.lists(
        st.tuples(st.floats(0.001, 9), st.sampled_from(["call", "call", "move", "cancel"])),
        max_size=60,
    ),
    st.sampled_from(["debounce", "leading", "both"]),
)
def test_a_key_has_at_most_one_waiting_message_whatever_users_do(
    actions: list[tuple[float, str]], kind: str
) -> None:
    """If the last call is to run, the message is of the last call."""
    place, at, last, cancelled = Place(), 0.0, "", False
    for number, (pause, action) in enumerate(actions):
        at += pause
        place.at(at)
        ahead = next(iter(place.waiting), "")
        if action == "call":
            last, cancelled = str(number), False
            if kind == "debounce":
                place.debounce(last, 3)
            else:
                place.throttle(last, 3, trails=kind == "both")
        elif action == "move" and ahead:
            place.move(ahead, 5)
        elif action == "cancel" and ahead:
            cancelled = ahead == last
            place.cancel(ahead)
        assert len(place.waiting) <= 1
    if last and not cancelled and kind != "leading":
        assert place.at(at + 100).started[-1][0] == last


@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=40),
    st.integers(500, 5000),
    st.none() | st.integers(5000, 20_000),
)
def test_debounce_runs_once_in_each_quiet_period(
    pauses_ms: list[int], quiet_ms: int, longest_ms: int | None
) -> None:
    """Compared with the definition: a call is dropped only if another one came during its wait."""
    place, calls_ms = Place(), list(accumulate(pauses_ms))
    for number, at_ms in enumerate(calls_ms):
        longest = None if longest_ms is None else longest_ms / 1000
        place.at(at_ms / 1000).debounce(str(number), quiet_ms / 1000, longest)
    expected, first_ms = [], calls_ms[0]
    for number, (at_ms, next_ms) in enumerate(zip_longest(calls_ms, calls_ms[1:])):
        due_ms = min(at_ms + quiet_ms, first_ms + (longest_ms or 1 << 60))
        if next_ms is None or next_ms >= due_ms:
            expected.append((str(number), due_ms / 1000))
            first_ms = next_ms
    assert place.at(10_000).started == expected


# ---- throttle -----------------------------------------------------------------------------------


def test_throttle_on_both_edges_runs_the_last_call_at_the_end_which_opens_a_window() -> None:
    place, answers = Place(), []
    for seconds, name in ((0, "a"), (1, "b"), (9, "c"), (12, "d"), (41, "e")):
        answers.append(place.at(seconds).throttle(name, 10, trails=True))
    assert answers == ["a", "b", "c", "d", "e"]
    assert place.at(90).started == [("a", 0), ("c", 10), ("d", 20), ("e", 41)]


@given(st.lists(st.floats(0.001, 9), min_size=1, max_size=60), st.booleans())
def test_no_two_starts_of_a_throttled_key_are_closer_than_its_window(
    pauses: list[float], trails: bool
) -> None:
    place, at = Place(), 0.0
    for number, pause in enumerate(pauses):
        at += pause
        answer = place.at(at).throttle(str(number), 3, trails=trails)
        assert answer in {*place.ran, *place.waiting}
    starts = [each for _, each in place.at(at + 100).started]
    assert all(later - former >= 3 - 1e-5 for former, later in pairwise(starts))
    if trails:  # the last call is never left out
        assert place.started[-1][0] == str(len(pauses) - 1)


def test_throttle_on_both_edges_starts_over_after_its_trailing_task_was_cancelled() -> None:
    """No task has run for a whole window, so the next call runs at once."""
    place = Place()
    place.at(0).throttle("a", 10, trails=True)
    place.at(1).throttle("b", 10, trails=True)
    place.cancel("b")
    place.at(2).throttle("c", 10, trails=True)
    assert place.at(9).started == [("a", 0)]
    place.cancel("c")
    assert place.at(11).throttle("d", 10, trails=True) == "d"
    assert place.at(60).started == [("a", 0), ("d", 11)]


# ---- unique -------------------------------------------------------------------------------------


def test_unique_until_start_a_redelivery_takes_over_the_key_and_a_killed_worker_frees_it() -> None:
    """The broker may have lost the message with the worker."""
    place = Place()
    place.at(0).unique("a")
    place.at(1).call(partial(receive, task_id="a", token="1"))
    assert place.at(50).unique("b") == "a"
    place.call(partial(receive, task_id="a", token="2"))
    place.call(partial(renew, token="1"))
    assert place.at(109).unique("b") == "a"
    assert place.at(111).unique("b") == "b"


def test_unique_until_start_a_retry_does_not_take_the_key_from_another_task() -> None:
    place = Place()
    place.at(0).unique("b", 60)
    before = place.record
    assert place.call(partial(receive, task_id="a", token="1")).free_us is None
    assert place.record == before


def test_a_unique_task_that_never_runs_frees_its_key_unless_it_still_waits() -> None:
    """A worker may drop the old delivery of a rescheduled task while the new one waits."""
    place = Place()
    place.at(0).unique("a", 60)
    place.call(partial(release, task_id="another"))
    place.call(partial(release, task_id="a"))
    assert place.unique("b") == "a"
    place.at(61).call(partial(release, task_id="a"))
    assert place.record is None
    place.unique("b")
    place.call(partial(begin, task_id="b", token="1"))
    place.call(partial(release, task_id="b", token="2"))
    assert place.unique("c") == "b"
    place.call(partial(release, task_id="b", token="1"))
    assert place.unique("c") == "c"


def test_a_lease_lapses_if_it_is_not_renewed() -> None:
    place = Place()
    place.at(0).unique("a")
    place.call(partial(begin, task_id="a", token="1"))
    for seconds in (50, 100):
        place.at(seconds).call(partial(renew, token="1"))
    assert place.at(159).unique("b") == "a"
    assert place.at(161).unique("b") == "b"
    step = place.call(partial(renew, token="1"))
    assert step.record is not None
    assert step.record.run is None


def test_a_redelivery_waits_until_the_lease_of_the_first_run_has_lapsed() -> None:
    place = Place()
    place.at(0).unique("a")
    place.call(partial(begin, task_id="a", token="1"))
    assert place.at(10).call(partial(begin, task_id="a", token="2")).free_us == 112 * SECOND
    assert place.at(60).call(partial(begin, task_id="a", token="2")).free_us is None
    before = place.record
    place.call(partial(end, token="1"))
    assert place.record == before
    place.call(partial(end, token="2"))
    assert place.record is None


def test_a_claim_of_once_ends_with_a_failure_or_its_lease_and_stands_after_a_success() -> None:
    place = Place()

    def claim(token: str) -> Step:
        return place.call(partial(rules.claim_once, task_id="a", token=token))

    assert claim("first").free_us is None
    assert claim("second").free_us == place.now_us + 2 * SECOND
    place.call(partial(end, token="first"))  # it has failed
    assert claim("second").free_us is None
    place.at(1 + LEASE_US / SECOND)  # its worker was killed
    assert claim("third").free_us is None
    place.call(partial(rules.ran_once, task_id="a", kept_us=LEASE_US))
    place.call(partial(renew, token="third"))
    place.call(partial(end, token="second"))
    assert claim("fourth").stands == "a"
    place.at(1 + 2 * LEASE_US / SECOND)
    assert claim("fourth").stands is None


def test_a_retry_keeps_the_key_while_it_waits() -> None:
    place = Place()
    place.at(0).unique("a")
    place.call(partial(begin, task_id="a", token="1"))
    place.call(partial(end, token="1", retry=("a", 3600 * SECOND)))
    assert place.at(3700).unique("b") == "a"
    assert place.call(partial(begin, task_id="a", token="2")).free_us is None


def test_a_lost_message_frees_its_key_after_a_day_unless_it_waits_for_longer() -> None:
    place = Place()
    place.at(0).unique("a", 60)
    place.waiting.clear()
    assert place.at(59 + BELIEVED_US / SECOND).unique("b") == "a"
    assert place.at(61 + BELIEVED_US / SECOND).unique("b") == "b"
    place.waiting["b"] = place.now_us + 1000 * BELIEVED_US  # rescheduled
    assert place.at(62 + 5 * BELIEVED_US / SECOND).unique("c") == "b"


# ---- records ------------------------------------------------------------------------------------

_IDS = st.none() | st.text(min_size=1)
_TIMES = st.integers(0, 1 << 52)
_RUNS = st.lists(st.builds(Run, st.text(), st.text(), _TIMES, _TIMES)).map(tuple)


@given(st.builds(Record, _IDS, _TIMES, _TIMES, _TIMES, _IDS, _RUNS, _TIMES))
def test_a_record_survives_encoding_and_decoding(record: Record) -> None:
    text = record.encoded()
    assert Record.decoded(text.encode()) == record
    assert Record.decoded(text).encoded() == text


def test_a_record_of_another_version_is_refused() -> None:
    with pytest.raises(TopologyMismatch, match="version 1"):
        Record.decoded('{"v":2,"id":"a"}')


@given(st.text(max_size=400), st.text(max_size=400))
def test_record_names_are_short_and_differ_if_the_keys_differ(one: str, other: str) -> None:
    names = name_of("unique", "shop.sync", one), name_of("unique", "shop.sync", other)
    assert (names[0] == names[1]) == (one == other)
    assert all(len(name.encode()) <= 200 for name in names)


def test_a_malformed_header_is_no_mark() -> None:
    for header in (
        None,
        {},
        {"v": 2, "kind": "unique", "key": "a"},
        {"v": 1, "kind": "unique", "key": 7},
        {"v": 1, "kind": "unique", "key": "\ud800"},
        {"v": 1, "kind": "unique", "key": "a", "until": ["end"]},
        {"v": 1, "kind": "unique", "key": "a", "token": {}, "until": 1},
    ):
        assert Mark.of({"task": "shop.sync", HEADER: header}) is None
    assert Mark.of({HEADER: {"v": 1, "kind": "unique", "key": "a"}}) is None, "it names no task"


# ---- moved to another place ---------------------------------------------------------------------


def test_a_moved_debounced_task_keeps_its_longest_wait() -> None:
    old, new = Place(), Place()
    for tenth in range(20):
        old.at(tenth / 10).debounce(f"{tenth}", 1, longest=4)
    new.at(2).carry("19", old)
    for tenth in range(20, 100):
        new.at(tenth / 10).debounce(f"{tenth}", 1, longest=4)
    assert new.at(60).started[0] == ("39", 4)
    assert old.record is None


def test_moving_a_trailing_task_moves_its_window() -> None:
    old, new = Place(), Place()
    for name in ("a", "b"):
        old.throttle(name, 5, trails=True)
    new.carry("b", old)
    assert new.throttle("c", 5, trails=False) == "a"
    assert old.throttle("d", 5, trails=True) == "d"
    assert new.at(60).started == [("b", 5)]


def test_moving_a_task_twice_leaves_one_copy() -> None:
    """The first process died before it had deleted the task from its old broker."""
    old, new = Place(), Place()
    old.unique("a", 50)
    there = dict(old.waiting)
    new.carry("a", old)
    old.waiting = there
    step = new.call(partial(carry, task_id="a", known=Record(), due_us=there["a"]))
    assert (step.stands, step.due_us, [*new.waiting]) == ("a", None, ["a"])


def test_a_task_is_moved_unless_another_task_waits_for_its_key_there() -> None:
    old, new = Place(), Place()
    old.unique("a", 50)
    new.unique("b", 5)
    assert new.carry("a", old) == "b"
    assert [*old.waiting] == ["a"]
    new.at(6).call(partial(begin, task_id="b", token="1"))
    assert new.carry("a", old) == "a"
    assert new.record is not None
    assert new.record.run is not None
    assert new.call(partial(begin, task_id="a", token="2")).free_us is not None


def test_the_lease_outlives_two_rounds_of_renewing() -> None:
    assert LEASE_US / SECOND >= 3 * rules.RENEWED_EVERY_SECONDS


# ---- the result, which also tells what the call did ----------------------------------------------


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", backend="cache+memory://")
    yield app
    app.close()


COPIED = [copy.copy, lambda found: pickle.loads(pickle.dumps(found))]


@pytest.mark.parametrize("copied", COPIED)
@pytest.mark.parametrize("told", [{}, {"created": False}, {"replaced": "six"}])
def test_a_keyed_result_pickles_copies_and_compares_as_celerys(
    app: Celery, copied: Callable[[Any], Any], told: dict[str, Any]
) -> None:
    plain = app.AsyncResult("seven", parent=app.AsyncResult("root"))
    found = copied(keyed_result(copy.copy(plain), **told))
    assert isinstance(found, KeyedResult)
    assert found == plain == "seven"
    assert {found, plain} == {plain}
    assert found.as_tuple() == plain.as_tuple()
    assert (found.backend.app, found.app) == (app, app)
    assert (found.created, found.replaced) == (told.get("created", True), told.get("replaced"))
    assert found.state == plain.state == "PENDING"


@pytest.mark.parametrize("copied", COPIED)
def test_an_eager_keyed_result_behaves_as_celerys(copied: Callable[[Any], Any]) -> None:
    plain = EagerResult("seven", 7, "SUCCESS", name="shop.add")
    found = copied(keyed_result(copy.copy(plain)))
    assert isinstance(found, EagerKeyedResult)
    assert found == plain
    assert (found.get(), found.state, found.created, found.replaced) == (7, "SUCCESS", True, None)


def test_a_keyed_result_keeps_the_attributes_of_celerys() -> None:
    with Celery("shop", broker="memory://", set_as_current=False) as other:
        plain = other.AsyncResult("seven")
        plain.ignored = True
        found = keyed_result(plain)
        assert found.app is other
        assert found.ignored
        assert found.get() is None
