"""``celery delay rates``, on Redis; it is the same on every broker."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from celery import Celery

from celery_native_delay import Delay, install
from celery_native_delay.app.installation import delaying_channel
from celery_native_delay.testing import PrivateRedis, private_redis
from tests.integration.project import APP, Project
from tests.lines import fill
from tests.waiting import PATIENCE_SECONDS

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
    assert shop.lines("rates") == ["no lines: no rated task has come lately"]
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
        assert sum_ == "38 waiting in 3 line(s)"
        told = shop.told("rates", "--limit", "2")
        assert told["more"]
        assert told["lines"] == [line.as_json() for line in Delay(app).rates()[:2]]


@on_redis
def test_without_rates_the_setting_is_named(tmp_path: Path, empty_redis: PrivateRedis) -> None:
    shop = Project(tmp_path).write(APP, empty_redis.url)
    (said,) = shop.lines("rates")
    assert said == "no lines: no task of this app has a rate, see native_delay_rates"


@on_redis
def test_reading_rates_again_and_again_uses_one_connection(empty_redis: PrivateRedis) -> None:
    """The app's pool has few connections."""
    with app_on(empty_redis.url) as app:
        fill(app, "shop.call_api", "ada", "10/h", waiting=7)
        with app.connection_for_write() as connection:
            channel, settings = delaying_channel(app, connection)
            for _ in range(50):
                with closing(channel.lines(settings)) as lines:
                    assert [line.waiting for line in lines.look(9)] == [7]


def test_watch_survives_an_outage_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    with private_redis() as redis, app_on(redis.url) as app:
        Project(tmp_path).write(APP, redis.url, rates=RATES)
        fill(app, "shop.call_api", "ada", "10/h", waiting=7)
        with watching(tmp_path) as process:
            assert process.stdout is not None

            def line(beginning: str) -> str:
                """The next line with that beginning."""
                assert process.stdout is not None
                return next(each for each in process.stdout if each.startswith(beginning))

            assert json.loads(line("{"))["lines"][0]["waiting"] == 7
            redis.kill()
            assert redis.url.partition("@")[2] in line("Error: ")
            redis.start()
            assert json.loads(line("{")).keys() == {"lines", "more"}
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_SECONDS) == 0
            assert "Traceback" not in process.stdout.read()


@contextmanager
def watching(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run ``delay rates --watch --json``, with its errors on standard output."""
    command = [sys.executable, "-m", "celery", "-A", "shop", "delay", "rates"]
    process = subprocess.Popen(
        [*command, "--json", "--watch", "0.2"],
        cwd=folder,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Background jobs of a shell ignore SIGINT, and so do their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)
        assert process.stdout is not None
        process.stdout.close()
