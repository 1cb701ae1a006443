"""Waiting tasks on a Redis broker, which needs no records beside it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery
from kombu import Queue

from celery_native_delay import CannotDelay, Delay, Query, delay_headers, install
from celery_native_delay.bulk import bulk
from celery_native_delay.testing import PrivateRedis
from tests.integration.project import Project
from tests.integration.redis_traffic import promoting, store_of
from tests.integration.waiting_promises import *  # noqa: F403
from tests.waiting import PATIENCE_SECONDS

PREFIX = "shop:"


def new_app(server: PrivateRedis) -> Celery:
    app = Celery("shop", broker=server.url, set_as_current=False)
    app.conf.update(
        result_backend=server.url, broker_transport_options={"global_keyprefix": PREFIX}
    )
    return app


@pytest.fixture
def app(empty_redis: PrivateRedis) -> Iterator[Celery]:
    app = install(new_app(empty_redis))
    with promoting(app.connection_for_write):
        yield app
    close_results(app)  # noqa: F405
    app.close()


@pytest.fixture
def plain_app(empty_redis: PrivateRedis) -> Iterator[Celery]:
    with new_app(empty_redis) as app:
        yield app
        close_results(app)  # noqa: F405


def test_nothing_is_left_of_what_was_handed_over(app: Celery, empty_redis: PrivateRedis) -> None:
    send(app, 1, countdown=0.3)  # noqa: F405
    send(app, 2, countdown=3600)  # noqa: F405
    with app.connection_for_read() as connection, inbox(connection, QUEUE) as arriving:  # noqa: F405
        arriving.wait_for(1)
        store = store_of(connection)
        assert empty_redis.client.zcard(store.keys.ids) == 1
        assert store.purge(parked=False) == 1
        left = {key.decode() for key in empty_redis.client.keys(f"{PREFIX}celery_delay.*")}
        assert left <= {store.keys.wake, store.keys.promoting}


def test_what_is_no_task_is_listed_and_stops_no_change_of_many(
    app: Celery, delay: Delay, empty_redis: PrivateRedis
) -> None:
    """Whatever its headers are like."""
    with app.connection_for_write() as connection:
        connection.Producer().publish(
            {},
            routing_key=QUEUE,  # noqa: F405
            declare=[Queue(QUEUE)],  # noqa: F405
            headers=delay_headers(countdown=1000) | {"retries": "many"},
        )
    for number in range(2):
        send(app, number, countdown=2000)  # noqa: F405
    (note, *tasks) = delay.ids()
    with pytest.raises(CannotDelay, match="others can be cancelled"):
        delay.run_now(note)
    outcomes = delay.run_all_now([note, *tasks])
    assert list(map(bool, outcomes)) == [False, True, True]
    assert "others can be cancelled" in str(outcomes[0])
    assert delay.cancel(note)


def test_a_search_of_thousands_finds_each_once_and_earliest_first(
    app: Celery, delay: Delay
) -> None:
    """Also those that one script after the other looks into, and when somebody looks no further."""
    with bulk(app) as batch:
        for number in range(2100):
            text = f"Käse-{number % 300}-Rest" if number % 2 else f"WURST {number % 300} rest"
            batch.send("shop.remind", (text,), countdown=3600 + number, queue=QUEUE)  # noqa: F405
    every = delay.ls(limit=3000).tasks
    assert len(every) == 2100
    for search in (
        *("REST", "e-69", "E-69-R", "käse", "zebra", "args:69-"),
        *("wurst 69", '"t 69"', "name:REMIND 42"),
    ):
        query = Query.parse(search)
        expected = [task for task in every if query.matches(task)]
        assert list(delay.ls(search, limit=3000).tasks) == expected
        assert list(delay.ls(search, offset=7, limit=3).tasks) == expected[7:10]
        assert delay.count(search) == len(expected)


def shop_source(app: Celery) -> str:
    return f"""
from celery import Celery
from celery_native_delay import install

app = Celery("shop", broker={app.conf.broker_url!r}, set_as_current=False)
app.conf.result_backend = {app.conf.result_backend!r}
app.conf.broker_transport_options = {app.conf.broker_transport_options!r}
install(app)
"""


@pytest.mark.timeout(300)  # each command is a process, which takes seconds on a busy machine
@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
def test_the_command_line_lists_cancels_and_moves(
    app: Celery, delay: Delay, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(shop_source(app))
    shop = Project(tmp_path)
    for number in range(6):
        send(app, number, countdown=1000 + number)  # noqa: F405
    listed = shop.told("ls", "--search", "käse", "--limit", "2")
    assert [task["id"] for task in listed["tasks"]] == ["order-1", "order-3"]
    assert shop.lines("ls", "-n", "1")[-1] == "1 of 6 waiting"
    assert shop.told("show", "order-2")["kwargs"] == "{'order': 2, 'text': 'wurst'}"
    assert shop.delay("cancel", "--search", "käse", answer="n\n").returncode == 1
    assert delay.count() == 6
    done = shop.delay("cancel", "--search", "käse", answer="y\n")
    assert "Cancel 3 task(s)?" in done.stderr
    assert done.stdout == "3 task(s) cancelled\n"
    assert shop.lines("reschedule", "order-0", "--countdown", "5000")[0].startswith(
        "order-0 is due 2"
    )
    assert shop.told("run-now", "order-1", "order-2", status=1) == {
        "done": 1,
        "outcomes": [
            {"id": "order-1", "verdict": "unknown"},
            {"id": "order-2", "verdict": "done"},
        ],
    }
    assert [task.id for task in delay.ls().tasks if task.id != "order-2"] == ["order-4", "order-0"]
    assert shop.delay("cancel").returncode == 2


@pytest.mark.ci
@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
def test_what_users_wrote_stays_in_its_cell_and_a_closed_pipe_is_no_broker_that_is_away(
    app: Celery, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(shop_source(app))
    for number in range(2000):  # more than a pipe holds
        send(app, number, countdown=1000 + number, task_id=f"\x1b[2J\n{number}")  # noqa: F405
    (_, line, told) = Project(tmp_path).lines("ls", "--limit", "1")
    assert "\\x1b[2J\\n0" in line
    assert told == "1 of 2,000 waiting"
    listing = [sys.executable, "-m", "celery", "-A", "shop", "delay", "ls", "-n", "2000"]
    with subprocess.Popen(
        listing, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        reader.stdout.readline()
        reader.stdout.close()
        assert reader.stderr.read() == ""
        assert reader.wait(timeout=PATIENCE_SECONDS) == 1


@pytest.mark.ci
@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
def test_the_command_line_shows_control_characters_and_never_writes_them(
    app: Celery, delay: Delay, tmp_path: Path
) -> None:
    """A terminal obeys an escape, and turns text round behind a bidirectional override."""
    (tmp_path / "shop.py").write_text(shop_source(app))
    shop = Project(tmp_path)
    hostile, shown = "\x1b[2J\x9b\u202eexe", r"\x1b[2J\x9b\u202eexe"
    name, task_id, queue = (f"{what}{hostile}" for what in "niq")
    app.send_task(name, (hostile,), task_id=task_id, countdown=1000, queue=queue)
    for arguments, times in (
        (("ls",), 4),
        (("cancel", task_id), 1),
        (("show", task_id), 1),
    ):
        done = shop.delay(*arguments)
        said = done.stdout + done.stderr
        assert said.count(shown) >= times, (arguments, said)
        assert said.replace("\n", "").isprintable(), (arguments, said)
