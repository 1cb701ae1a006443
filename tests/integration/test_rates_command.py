"""``celery delay rates``, on Redis; it is the same on every broker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_native_delay import Delay, Rate, SettingsError, install
from celery_native_delay.app.delay import adopt_rates
from celery_native_delay.app.retrying import _hold
from celery_native_delay.rates.line import Asked, places_in
from celery_native_delay.records.waiting import PLACE
from celery_native_delay.testing import PrivateRedis
from tests.integration.project import APP, Project
from tests.lines import fill

# Each command is a process, which takes seconds on a busy machine.
pytestmark = pytest.mark.timeout(300)

on_redis = pytest.mark.parametrize("server_name", ["redis"], indirect=True)

RATES = {"shop.call_api": "10/h"}


def app_on(url: str) -> Celery:
    return install(Celery("shop", broker=url, set_as_current=False), rates=RATES)


@on_redis
def test_rates_are_listed_with_the_longest_queue_first(
    tmp_path: Path, empty_redis: PrivateRedis
) -> None:
    shop = Project(tmp_path).write(APP, empty_redis.url, rates=RATES)
    assert shop.lines("rates") == ["no rate-limited task has come lately"]
    assert shop.told("rates") == {"lines": [], "more": False}

    with app_on(empty_redis.url) as app:
        fill(app, "shop.call_api", "ada\x1b[31m", "10/h", waiting=7)
        fill(app, "shop.call_api", "bob", "10/h", waiting=30)
        fill(app, "shop.mail", None, "10/d", waiting=0, held_seconds=3600)
        heading, bob, ada, mail, sum_ = shop.lines("rates")
        assert heading == "task key rate waiting next slot utilisation held"
        assert re.fullmatch(r"shop.call_api bob 10/h 30 \d min( \d+ s)? 10 %", bob)
        assert ada.startswith("shop.call_api ada\\x1b[31m 10/h 7 ")
        assert re.fullmatch(r"shop.mail 10/d 1 \d.* 10 % (1 h|59 min.*)", mail)
        assert sum_ == "38 task(s) waiting in 3 line(s)"
        told = shop.told("rates", "--limit", "2")
        assert told["more"]
        assert told["lines"] == [line.as_json() for line in Delay(app).rates(limit=2)]


@on_redis
def test_the_rate_of_a_key_is_set_and_unset(tmp_path: Path, empty_redis: PrivateRedis) -> None:
    shop = Project(tmp_path).write(APP, empty_redis.url, rates=RATES)
    with app_on(empty_redis.url) as app:
        fill(app, "shop.call_api", "ada", "10/h", waiting=7)
        (said,) = shop.lines("rates", "set", "shop.call_api", "20/m", "--key", "ada")
        assert said == "set to 20/m; 0 waiting task(s) moved"
        assert shop.lines("rates")[1].startswith("shop.call_api ada 20/m * 7 ")
        fill(app, "shop.call_api", "ada", "10/h", waiting=0)
        (line,) = Delay(app).rates()
        assert (line.rate, line.waiting, line.overridden) == ("20/m", 8, True)
        (said,) = shop.lines("rates", "unset", "shop.call_api", "--key", "ada")
        assert said.startswith("the limit in native_delay_rates applies again")
        (line,) = Delay(app).rates()
        assert (line.rate, line.waiting, line.overridden) == ("10/h", 8, False)
        told = shop.told("rates", "set", "shop.call_api", "30/m", "--key", "bob")
        assert told == {"name": "shop.call_api", "key": "bob", "limit": "30/m", "moved": 0}
        told = shop.told("rates", "unset", "shop.call_api", "--key", "bob")
        assert told == {"name": "shop.call_api", "key": "bob", "limit": None, "moved": 0}
        with pytest.raises(SettingsError, match=r"\(shop.call_api\), got 'shop.cal'"):
            Delay(app).set_rate("shop.cal", "ada", "1/s")
        with pytest.raises(SettingsError, match="expected a rate such as"):
            Delay(app).set_rate("shop.call_api", "ada", "fast")


@on_redis
def test_a_rate_is_set_for_the_keys_that_tasks_have(empty_redis: PrivateRedis) -> None:
    """A task's key may be a number; its line then has the number's text."""
    with app_on(empty_redis.url) as app:
        fill(app, "shop.call_api", "1", "10/h", waiting=7)
        set_rate: Any = Delay(app).set_rate
        set_rate("shop.call_api", 1, "20/m")
        (line,) = Delay(app).rates()
        assert (line.key, line.rate) == ("1", "20/m")
        for key, expected in (("\ud800", "without lone surrogates"), (b"1", "str, int, bool")):
            with pytest.raises(SettingsError, match=f"expected .*{expected}"):
                set_rate("shop.call_api", key, "20/m")


@on_redis
def test_a_worker_that_starts_changes_all_queues_to_its_rates_except_set_ones(
    empty_redis: PrivateRedis,
) -> None:
    with app_on(empty_redis.url) as app:
        assert adopt_rates(app) is None
        for key in ("ada", "bob"):
            fill(app, "shop.call_api", key, "5/h", waiting=3)
        Delay(app).set_rate("shop.call_api", "ada", "20/m")
        move = adopt_rates(app)
        assert move is not None
        assert move() == 0, "no message waits"
        rates = {line.key: line.rate for line in Delay(app).rates()}
        assert rates == {"ada": "20/m", "bob": "10/h"}


@on_redis
def test_retry_after_puts_its_task_first_in_the_queues_of_all_its_limits(
    empty_redis: PrivateRedis,
) -> None:
    limits = [Asked("shop.call_api", "ada", Rate("10/h")), Asked("all", None, Rate("5000/d"))]
    with app_on(empty_redis.url) as app:
        for limit in limits:
            fill(app, limit.name, limit.key, limit.rate.limit, waiting=7)
        headers: dict[str, Any] = {}
        for limit in limits:
            _hold(app, limit.name, limit, 30, headers)
        assert places_in(headers[PLACE]) == {limit.line: 0 for limit in limits}
        assert [line.waiting for line in Delay(app).rates()] == [8, 8]
