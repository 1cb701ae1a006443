"""Rates in Redis: the Lua script agrees with the Python arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_native_delay import Rate, StoreUnavailable
from celery_native_delay.rates.in_redis import RedisLines
from celery_native_delay.rates.line import Asked, Line, ask_all, name_of
from celery_native_delay.records.interface import RecordName, Snapshot
from celery_native_delay.records.redis import IndexKeys, RedisRecords
from celery_native_delay.testing import PrivateRedis, private_redis

NOON_US = 1_795_176_000_000_000

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateRedis]:
    with private_redis() as server:
        yield server


@pytest.fixture(scope="module")
def lines(server: PrivateRedis) -> Iterator[RedisLines]:
    lines = lines_on(server)
    yield lines
    lines.close()


def lines_on(server: PrivateRedis) -> RedisLines:
    pool = redis.ConnectionPool.from_url(server.url)
    lines = RedisLines(pool, IndexKeys("test"), server.url)
    lines._records = StoppedRecords(lines._link, IndexKeys("test"))
    return lines


class StoppedRecords(RedisRecords):
    """Records in Redis at a time that the test sets."""

    now_us: int | None = None

    def read(self, name: RecordName) -> Snapshot:
        seen = super().read(name)
        return seen if self.now_us is None else replace(seen, now_us=self.now_us)


_numbers = count()


@settings(max_examples=100)
@given(
    rate=st.builds(
        Rate,
        st.sampled_from(["1/s", "2/s", "7/s", "997/s", "100/m"]),
        burst=st.sampled_from([1, 10]),
    ),
    steps=st.lists(
        st.tuples(
            st.sampled_from(
                ["join", "join", "line up", "return", "hold", "set", "unset", "deploy"]
            ),
            st.sampled_from([0, 1, 3_333, 100_000, 1_000_000, 61_000_000]),
            st.integers(0, 10),
        ),
        max_size=30,
    ),
)
def test_the_script_agrees_with_the_arithmetic(
    server: PrivateRedis, lines: RedisLines, rate: Rate, steps: list[tuple[str, int, int]]
) -> None:
    """Also after changes of the rate, by a user or by a deployment."""
    task, now_us, line = f"shop.t{next(_numbers)}", NOON_US, Line()
    places: list[int] = []
    asked_with, counts, stored = rate, rate, False
    for kind, passed_us, number in steps:
        now_us += passed_us
        lines.now_us = lines._records.now_us = now_us
        other = Rate("10/s", burst=1 + number)
        if kind in ("set", "unset"):
            is_set, rate = kind == "set", other if kind == "set" else asked_with
            if stored and rate.shown != counts.shown:
                line = line.changed(counts, rate, now_us)
            line, counts = line._replace(is_set=int(is_set)), rate
            said = lines.change(
                Asked(task, "ada", rate), lambda line, *_: (line, line), sets=is_set
            )
            assert said == line
            stored = True
            continue
        if kind == "deploy":
            asked_with = other
            continue
        if not line.is_set and asked_with.shown != counts.shown:
            if stored:
                line = line.changed(counts, asked_with, now_us)
            counts = asked_with
        rate, stored = counts, True
        if kind == "hold":
            seconds = number * rate.period_us / 4_000_000
            line, place = line.hold(rate, now_us, round(seconds * 1_000_000))
            hold = partial(Line.hold, wait_us=round(seconds * 1_000_000))
            assert lines.change(Asked(task, "ada", asked_with), hold) == place
            places.append(place)
        else:
            asked = places[number % len(places)] if kind == "return" and places else None
            may_start = kind != "line up"
            line, turn = line.ask(rate, now_us, asked, may_start=may_start)
            told = lines.ask([Asked(task, "ada", asked_with, asked)], may_start=may_start)
            assert told == turn
            if turn.place is not None:
                places.append(turn.place)
        key = f"test.rate.{name_of(task, 'ada')}"
        state, log = server.client.get(key).decode().split("\n")
        assert state == line.encoded(rate)
        assert tuple(map(int, log.split())) == line.log


@settings(max_examples=100)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([None, 0, 1, 2, 3]),
            st.sampled_from([0, 1, 3_333, 100_000, 1_000_000, 61_000_000]),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_the_script_agrees_about_several_limits(
    lines: RedisLines, steps: list[tuple[int | None, int, bool]]
) -> None:
    task, now_us = f"shop.t{next(_numbers)}", NOON_US
    rates = (Rate("7/s"), Rate("10/m", burst=3), Rate("40/m", burst=5))
    kept = [Line()] * 3
    waiting: list[list[int | None]] = []
    for number, passed_us, may_start in steps:
        now_us += passed_us
        lines.now_us = lines._records.now_us = now_us
        is_new = number is None or not waiting
        places = [None] * 3 if is_new else waiting.pop((number or 0) % len(waiting))
        asked = [
            Asked(f"{task}#{at}", "ada", rate, place)
            for at, (rate, place) in enumerate(zip(rates, places, strict=True))
        ]
        kept, turn = ask_all(kept, asked, now_us, may_start=may_start)
        assert lines.ask(asked, may_start=may_start) == turn
        if not turn.starts:
            places[turn.at] = turn.place
            waiting.append(places)


def test_the_queues_of_rates_are_listed_longest_first_and_expire(server: PrivateRedis) -> None:
    server.client.flushdb()
    lines = lines_on(server)
    rate = Rate("10/m")
    for key, number in (("ada", 3), ("bob", 7), (None, 5)):
        for _ in range(number):
            lines.ask([Asked("shop.call_api", key, rate)])
    seen = lines.look(10)
    assert [(line.task, line.key, line.waiting, line.starts_last_period) for line in seen] == [
        ("shop.call_api", "bob", 6, 1),
        ("shop.call_api", None, 4, 1),
        ("shop.call_api", "ada", 2, 1),
    ]
    assert [line.key for line in lines.look(1)] == ["bob"]
    assert lines.look(0) == []
    for key in server.client.keys("test.rate.*"):
        assert 60_000 < server.client.pttl(key) < 60_000 * 4
    lines.close()


def test_an_unreachable_server_raises_and_is_tried_again(server: PrivateRedis) -> None:
    lines = lines_on(server)
    assert lines.ask([Asked("shop.call_api", "new", Rate("1/h"))]).starts
    server.stop()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="does not work"):
            lines.ask([Asked("shop.call_api", "new", Rate("1/h"))])
    server.start()
    assert lines.ask([Asked("shop.call_api", "newer", Rate("1/h"))]).starts
    lines.close()
