"""Queries for waiting tasks, their histograms and outcomes."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from celery.utils.saferepr import saferepr
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay import InvalidQuery, Outcome, Query, Verdict, Waiting
from celery_native_delay.records.waiting import edges

SECOND_US = 1_000_000


def task(**changes: Any) -> Waiting:
    """A waiting task."""
    values = {
        "id": "order-7",
        "name": "shop.remind",
        "args": "('ada@example.com', 3)",
        "kwargs": "{'order': 7, 'text': 'soon over'}",
        "queue": "reminders",
        "exchange": "",
        "routing_key": "reminders",
        "due_us": 100 * SECOND_US,
        "retries": 0,
        "root_id": "root-1",
        "delivery_id": "d",
        "key": "user:7",
        "kind": "debounce",
    }
    return Waiting(**(values | changes))


FINDS = [
    *("", "ada", "args:ada@example.com", "kwargs:order=7", 'kwargs:text="soon over"'),
    *('"soon over"', "queue:reminders uuid:order-7 root:root-1", "key:user:7", "key:USER"),
    *("NAME:REMIND", 'kwargs:text="Soon Over"', "kwargs:soon"),
]
FINDS_NOT = [
    *("shop.remind bob", "name:ada", "soon under", "key:user:71", "a:b", '"(bob"'),
    *("kwargs:order=", "kwargs:text=soon", r"args:\""),
]


def test_a_search_finds_tasks_that_have_all_its_words() -> None:
    found = [search for search in (*FINDS, *FINDS_NOT) if Query.parse(search).matches(task())]
    assert found == FINDS


@pytest.mark.parametrize(
    "others",
    [
        {"text": "two\nlines"},
        {"text": "O'Brien, 'order': 8, {[("},
        {"when": datetime(2026, 11, 23), "of": UUID(int=7), "price": Decimal("1.5")},
        {"at": {"a": [datetime(2026, 11, 23), ("(", "]")]}},
    ],
)
def test_a_pair_is_found_beside_arguments_of_any_kind(others: dict[str, Any]) -> None:
    for kwargs in ({"order": 7, **others}, {**others, "order": 7}):
        told = saferepr(kwargs, 1024)
        for search, matches in (("order=7", True), ("order=8", False), ("a=1", False)):
            assert Query.parse(f"kwargs:{search}").matches(task(kwargs=told)) is matches


def test_a_pair_is_found_before_an_argument_that_celery_has_cut() -> None:
    told = saferepr({"order": 7, "name": "O'Brien", "text": "long" * 1000}, 1024)
    query = Query.parse("kwargs:name=O'Brien kwargs:order=7")
    assert query.matches(task(kwargs=told))
    assert query.needle.upper() in told.upper()


@pytest.mark.parametrize("kwargs", ["{'a': {[1]}}", "{'a': 0x" + "f" * 4000 + "}", "{", "7"])
def test_arguments_that_are_no_literal_match_no_pair(kwargs: str) -> None:
    """The repr of arguments may be no Python literal."""
    assert not Query.parse("kwargs:a=1").matches(task(kwargs=kwargs))


@pytest.mark.parametrize("search", ['"open', "name:", 'word "', '""', "-word"])
def test_an_invalid_search_is_refused(search: str) -> None:
    with pytest.raises(InvalidQuery, match="expected"):
        Query.parse(search)


WORDS = st.sampled_from(
    [
        *("ada", "ADA", "remind", "bob", '"soon over"', "order-7", "name:shop", "args:ada"),
        *("kwargs:order=7", "kwargs:order=70", 'kwargs:text="soon over"', "kwargs:soon", "a:bcd"),
        *(r"\"ada\"", "a\\", "käse", "7"),
    ]
)


@given(st.lists(WORDS, max_size=8))
def test_a_matching_task_contains_the_text_that_the_store_searches_for(words: list[str]) -> None:
    """In upper or lower case, anywhere in the stored message."""
    query, known = Query.parse(" ".join(words)), task()
    assert query.needle == query.needle.lower()
    if query.matches(known):
        stored = json.dumps([getattr(known, name) for name in Waiting.__slots__])
        assert query.needle in stored.lower()


@given(st.lists(WORDS, min_size=1, max_size=8))
def test_a_search_finds_a_task_if_each_word_alone_finds_it(words: list[str]) -> None:
    together = Query.parse(" ".join(words)).matches(task())
    assert together is all(Query.parse(word).matches(task()) for word in words)


def test_a_search_for_a_run_finds_no_run_with_a_longer_name() -> None:
    """Else who cancels the tasks of ``run:nightly-2`` would cancel those of ``nightly-20``."""
    found = [Query.parse("run:nightly-2").matches(task(run=f"nightly-{day}")) for day in (2, 20)]
    assert found == [True, False]
    assert Query.parse('run:"Two words"').matches(task(run="two words"))


def test_a_range_of_due_times_includes_its_begin_and_not_its_end() -> None:
    query = Query().due_within(100 * SECOND_US, 101 * SECOND_US)
    found = [query.matches(task(due_us=at * SECOND_US)) for at in (99, 100, 101)]
    assert found == [False, True, False]


@given(st.integers(0, 2**52), st.integers(0, 2**48), st.integers(1, 200))
def test_a_histogram_covers_every_due_time_with_bars_of_one_width(
    first_us: int, span_us: int, bars: int
) -> None:
    found = edges(first_us, first_us + span_us, bars=bars)
    assert found[0] <= first_us
    assert first_us + span_us < found[-1]
    assert 2 <= len(found) <= bars + 1
    assert len({end - begin for begin, end in pairwise(found)}) == 1


def test_a_histogram_has_bars_of_round_times() -> None:
    found = edges(10 * SECOND_US, 29 * SECOND_US, bars=10)
    assert list(found) == [second * SECOND_US for second in range(10, 31, 2)]


def test_an_outcome_is_true_if_the_change_was_made_and_tells_what_was_done() -> None:
    for verdict, is_done, said in (
        (Verdict.DONE, True, "a cancelled"),
        (Verdict.NOTED, True, "a: noted, it will not run if it still waits in the broker"),
        (Verdict.UNKNOWN, False, "a: nothing waits under this id"),
        (Verdict.TOO_LATE, False, "a: too late, it was delivered meanwhile"),
    ):
        outcome = Outcome("a", verdict)
        assert (bool(outcome), str(outcome)) == (is_done, said)
    assert str(Outcome("a", Verdict.DONE, due_us=0)) == "a is due 1970-01-01T00:00:00.000+00:00"
    assert str(Outcome("a", Verdict.IMPOSSIBLE, reason="it is no task")) == "a: it is no task"
