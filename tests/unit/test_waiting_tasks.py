"""What can be asked of the waiting, and how histograms are cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from celery.events.state import Task
from flower.utils.search import QuerySyntaxError, TaskSearchEngine
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay import InvalidQuery, Outcome, Query, Verdict, Waiting
from celery_native_delay.records.looking import to_find
from celery_native_delay.records.waiting import edges
from celery_native_delay.transports.rabbitmq.entry import Entry, waiting

SECOND_US = 1_000_000


def task(**changes: Any) -> Waiting:
    """Something that waits."""
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


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("", True),
        ("ada", True),
        ("bob", False),
        ("shop.remind ada", True),
        ("shop.remind bob", False),
        ("name:remind", True),
        ("name:ada", False),
        ("args:ada@example.com", True),
        ("kwargs:order=7", True),
        ("kwargs:order=8", False),
        ('kwargs:text="soon over"', True),
        ('"soon over"', True),
        ("soon under", False),
        ("queue:reminders uuid:order-7 root:root-1", True),
        ("queue:emails", False),
        ("key:user:7", True),
        ("key:USER", True),
        ("user:7", True),
        ("key:ada", False),
        ("key:user:71", False),
        ("a:b", False),
        ("soon AND reminders", True),
        ("bob OR soon", True),
        ("bob OR soon args:bob", False),
        ("(bob OR soon) reminders", True),
        ("(bob OR (soon AND (ada)))", True),
        ('"OR" order', True),
        ('"(bob"', False),
        ("SHOP.Remind ADA", True),
        ("NAME:REMIND", True),
        ("kwargs:order=", False),
        ('kwargs:text="Soon Over"', True),
        ("kwargs:text=soon", False),
        ("kwargs:soon", True),
        ("kwargs:ORDER=7", True),
        ("state:delayed", True),
        ("state:SUCCESS", False),
        ("worker:w1 OR result:ok", False),
        (r"args:\"", False),
    ],
)
def test_a_search_finds_what_has_all_its_words(search: str, found: bool) -> None:
    assert Query.parse(search).matches(task()) is found


@pytest.mark.parametrize("kwargs", ["{'a': {[1]}}", "{'a': 0x" + "f" * 4000 + "}", "{", "7"])
def test_arguments_whose_text_is_no_literal_match_no_pair(kwargs: str) -> None:
    """Such as a set of what can be hashed and looks like a list."""
    assert not Query.parse("kwargs:a=1").matches(task(kwargs=kwargs))


@pytest.mark.parametrize(
    "search",
    [
        *('"open', "name:", 'word "', '""', "NOT word", "-word", "AND word", "word OR", "OR"),
        *("()", "(word", "word)", "word (AND word)", "(((((( word ))))))"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(search: str) -> None:
    with pytest.raises(InvalidQuery, match="expected"):
        Query.parse(search)


WORDS = st.sampled_from(
    [
        *("ada", "ADA", "remind", "bob", '"soon over"', "order-7", "name:shop", "args:ada"),
        *("kwargs:order=7", "kwargs:order=70", 'kwargs:text="soon over"', "kwargs:soon", "a:bcd"),
        *("state:delayed", "state:SUCCESS", "result:x1y", "worker:ada", r"\"ada\"", "a\\"),
        *("AND", "OR", "(", ")", "NOT", "-ada", '"', '"('),
    ]
)


@given(st.lists(WORDS, max_size=8))
def test_a_search_means_what_it_means_in_flower(words: list[str]) -> None:
    """What Flower refuses is refused, too, but for short words."""
    text = " ".join(words)
    engine = TaskSearchEngine()
    known = task(queue="", exchange="", routing_key="", root_id="", key="")
    shown = {"name": known.name, "args": known.args, "kwargs": known.kwargs, "state": "DELAYED"}
    engine.upsert(Task(known.id, **shown))
    try:
        expected = bool(engine.matching_ids(text))
    except QuerySyntaxError as exc:
        if "at least 3 characters" in str(exc):
            return
        with pytest.raises(InvalidQuery):
            Query.parse(text)
    else:
        query = Query.parse(text)
        assert query.matches(known) is expected
        written = f"{known.id} {known.name} {known.args} {known.kwargs}"
        if expected:
            assert all(needle in written for needle in query.needles)
            assert all(
                any(text in written.lower() for text in group)
                for group in query.needles_in_any_case
            )


LIKELY = st.text(st.sampled_from("abAB1'-"), max_size=12)


@given(LIKELY.filter(bool).map(str.lower), LIKELY, st.lists(LIKELY, max_size=3))
def test_what_is_looked_for_in_entries_is_there_in_whatever_case(
    text: str, entry: str, sample: list[str]
) -> None:
    """Whatever was thought to be rare: the ways, and the text where they are a part of it."""
    pairs = to_find(text, sample)
    found = any(way in entry and rest in entry.lower() for way, rest in pairs)
    assert found is (text in entry.lower())


def test_a_range_of_due_times_includes_its_begin_and_not_its_end() -> None:
    query = Query().due_within(100 * SECOND_US, 101 * SECOND_US)
    assert [query.matches(task(due_us=at * SECOND_US)) for at in (99, 100, 101)] == [
        False,
        True,
        False,
    ]


@given(
    st.integers(0, 2**52),
    st.integers(0, 2**48),
    st.integers(1, 200),
)
def test_a_histogram_covers_every_due_time_with_bars_of_one_width(
    first_us: int, span_us: int, bars: int
) -> None:
    found = edges(first_us, first_us + span_us, bars=bars)
    assert found[0] <= first_us
    assert first_us + span_us < found[-1]
    assert 2 <= len(found) <= bars + 1
    assert len({end - begin for begin, end in pairwise(found)}) == 1


def test_a_histogram_has_bars_of_round_times() -> None:
    assert edges(10 * SECOND_US, 29 * SECOND_US, bars=10) == [
        second * SECOND_US for second in (10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
    ]


def test_an_outcome_is_true_if_it_was_done_and_says_what_happened() -> None:
    assert Outcome("a", Verdict.DONE)
    assert not Outcome("a", Verdict.TOO_LATE)
    assert str(Outcome("a", Verdict.DONE)) == "a cancelled"
    assert str(Outcome("a", Verdict.DONE, due_us=0)) == "a is due 1970-01-01T00:00:00.000+00:00"
    assert str(Outcome("a", Verdict.UNKNOWN)) == "a: nothing waits under this id"
    assert "handed over" not in repr(Outcome("a", Verdict.UNKNOWN))
    assert str(Outcome("a", Verdict.TOO_LATE)) == "a: too late, it was handed over meanwhile"
    refused = Outcome("a", Verdict.IMPOSSIBLE, reason="it is no task")
    assert str(refused) == "a: it is no task"


def test_an_entry_of_the_records_is_the_whole_message() -> None:
    headers = {"task": "shop.remind", "id": "order-7", "argsrepr": "(b'\\n',)", "x": b"\xff"}
    properties = {"application_headers": headers, "priority": 3, "content_encoding": "binary"}
    entry = Entry(properties, b"\x00\n\xff{}", "shop", "orders.new", "orders", 12)
    assert Entry.decoded(entry.encoded()) == entry
    seen = waiting("order-7:d1", entry.encoded(), 5)
    assert (seen.id, seen.name, seen.queue, seen.delivery_id) == (
        "order-7",
        "shop.remind",
        "orders",
        "d1",
    )
