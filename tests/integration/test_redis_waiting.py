"""Waiting tasks on Redis, and ``bulk(app)``: each task is stored once, in doubt or refused.

tests/conformance has the tests for all brokers.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any

import pytest
from celery import Celery
from kombu import Queue

from celery_native_delay import (
    CannotDelay,
    Delay,
    InvalidQuery,
    PublishRefused,
    Query,
    delay_headers,
    install,
)
from celery_native_delay.bulk import bulk
from celery_native_delay.testing import PrivateRedis
from celery_native_delay.transports.redis.keys import RedisBrokerKeys
from tests.integration.redis_traffic import connector, promoting, store_of
from tests.traffic import JOBS, inbox, send_task
from tests.waiting import wait_until

PREFIX = "shop:"


@pytest.fixture
def app(empty_redis: PrivateRedis) -> Iterator[Celery]:
    app = Celery("shop", broker=empty_redis.url, set_as_current=False)
    app.conf.broker_transport_options = {"global_keyprefix": PREFIX}
    with install(app), promoting(app.connection_for_write):
        yield app


def test_delivered_tasks_leave_no_keys(app: Celery, empty_redis: PrivateRedis) -> None:
    send_task(app, 1, countdown=0.3)
    send_task(app, 2, countdown=3600)
    with app.connection_for_read() as connection, inbox(connection, JOBS) as arriving:
        arriving.wait_for(1)
        store = store_of(connection)
        assert empty_redis.client.zcard(store.keys.ids) == 1
        assert store.purge(parked=False) == 1
        left = {key.decode() for key in empty_redis.client.keys(f"{PREFIX}celery_delay.*")}
        assert left <= {store.keys.wake, store.keys.promoting}


def test_a_message_that_is_no_task_is_listed_and_does_not_stop_run_all_now(
    app: Celery, delay: Delay, empty_redis: PrivateRedis
) -> None:
    """Its headers are not those of a task."""
    with app.connection_for_write() as connection:
        connection.Producer().publish(
            {},
            routing_key=JOBS,
            declare=[Queue(JOBS)],
            headers=delay_headers(countdown=1000) | {"retries": "many"},
        )
    for number in range(2):
        send_task(app, number, countdown=2000)
    (note, *tasks) = delay.ids()
    with pytest.raises(CannotDelay, match="others can be cancelled"):
        delay.run_now(note)
    outcomes = delay.run_all_now([note, *tasks])
    assert list(map(bool, outcomes)) == [False, True, True]
    assert "others can be cancelled" in str(outcomes[0])
    assert delay.cancel(note)


def test_a_full_server_lets_waiting_tasks_be_cancelled_and_rescheduled(
    app: Celery, delay: Delay, empty_redis: PrivateRedis
) -> None:
    for number in range(2):
        send_task(app, number, countdown=1000)
    cancelled, moved = delay.ids()
    empty_redis.client.config_set("maxmemory", 1)
    try:
        assert delay.cancel(cancelled)
        assert delay.reschedule(moved, countdown=2000)
    finally:
        empty_redis.client.config_set("maxmemory", 0)
    assert list(delay.ids()) == [moved]


def test_a_queue_is_listed_with_its_whole_name(app: Celery, delay: Delay) -> None:
    """Without the priority that kombu appends, and also if the name contains kombu's ``sep``."""
    app.conf.broker_transport_options = {"global_keyprefix": PREFIX, "sep": ":"}
    names = ["tenant:3", "tenant:7", "tenant"]
    for queue in names:
        for priority in (0, 3, 9):
            send_task(app, 1, countdown=1000, queue=queue, priority=priority)
    assert sorted(task.queue for task in delay.ls()) == sorted(names * 3)
    assert delay.count(Query(queue="tenant:7")) == 3


def test_a_search_of_thousands_of_tasks_in_several_scripts(app: Celery, delay: Delay) -> None:
    """Each match is found once, the earliest first, with and without a limit."""
    with bulk(app) as batch:
        for number in range(2100):
            text = f"Käse-{number % 300}-Rest" if number % 2 else f"WURST {number % 300} rest"
            batch.send("shop.remind", (text,), countdown=3600 + number, queue=JOBS)
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


ODD = "a\ud800"
"""UTF-8 cannot encode the lone surrogate."""


def test_an_id_with_a_lone_surrogate_waits_is_found_and_cancelled(
    app: Celery, delay: Delay
) -> None:
    send_task(app, 1, countdown=1000, task_id=ODD)
    with bulk(app) as batch:
        batch.send("shop.order", countdown=1000, task_id=f"{ODD}b")
    assert delay.ids() == [ODD, f"{ODD}b"]
    assert (bool(delay.cancel(ODD)), bool(delay.run_now(f"{ODD}b"))) == (True, True)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda app: Delay(app).unique(app.signature(ODD), key="7"), ValueError),
        (lambda app: Delay(app).cancel(key="7", task=ODD, kind="unique"), ValueError),
        (lambda app: Delay(app).update("order-1", queue=ODD), CannotDelay),
        (lambda app: Delay(app).hold(ODD), InvalidQuery),
        (lambda app: Delay(app).schedules().pause(ODD), KeyError),
        (lambda app: Delay(app).schedules().remove(ODD), KeyError),
    ],
)
def test_another_name_with_a_lone_surrogate_is_a_clear_error(
    app: Celery, call: Callable[[Celery], object], error: type[Exception]
) -> None:
    send_task(app, 1, countdown=1000)
    with pytest.raises(error, match="expected"):
        call(app)


# ---- bulk ----------------------------------------------------------------------------------------

KEYS = RedisBrokerKeys("", "celery_delay")


def make_app(url: str, **transport_options: Any) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(
        task_default_queue="plain",
        task_ignore_result=True,
        broker_transport_options=transport_options,
    )
    install(app)

    @app.task(name="shop.remind", shared=False)
    def remind(number: int = 0) -> None:
        """Never run here."""

    return app


@pytest.fixture
def shop(empty_redis: PrivateRedis) -> Iterator[Celery]:
    with make_app(empty_redis.url) as app:
        yield app


def numbers(redis: PrivateRedis, queue: str = "plain") -> list[int]:
    """The first argument of each task in *queue*."""
    bodies = [b64decode(json.loads(text)["body"]) for text in redis.client.lrange(queue, 0, -1)]
    return sorted(json.loads(body)[0][0] for body in bodies)


@pytest.mark.ci
def test_killed_connections_neither_lose_nor_duplicate_tasks(
    empty_redis: PrivateRedis, shop: Celery
) -> None:
    """Unconfirmed tasks are sent again; tasks handed over meanwhile are not stored twice."""
    ended = Event()
    kills = 0

    def kill() -> None:
        nonlocal kills
        while not ended.wait(0.15):
            empty_redis.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            kills += 1

    killer = Thread(target=kill, daemon=True)
    with promoting(connector(empty_redis.url)):
        killer.start()
        with bulk(shop, window=300) as batch:
            sent = 0
            while kills < 8 or sent < 1_000:
                batch.send("shop.remind", (sent,), countdown=sent % 3 / 100)
                sent += 1
        ended.set()
        killer.join()
        wait_until(lambda: not empty_redis.client.zcard(KEYS.due))
    assert batch.result.confirmed == sent
    assert numbers(empty_redis) == list(range(sent))
    assert not empty_redis.client.keys(f"{KEYS.space}.taken.*")


def test_flushed_scripts_are_sent_again(empty_redis: PrivateRedis, shop: Celery) -> None:
    with bulk(shop, window=250) as batch:
        for number in range(2_000):
            if number % 300 == 0:
                empty_redis.client.script_flush()
            batch.send("shop.remind", (number,), countdown=0 if number % 20 == 0 else 60)
    assert batch.result.confirmed == 2_000
    assert len(numbers(empty_redis)) == 100
    assert empty_redis.client.zcard(KEYS.due) == empty_redis.client.hlen(KEYS.messages) == 1_900


def test_tasks_that_a_full_server_refuses_are_reported(own_redis: PrivateRedis) -> None:
    app = make_app(own_redis.url)
    own_redis.client.config_set("maxmemory-policy", "noeviction")
    batch = bulk(app)

    def send_all() -> None:
        with batch:
            for number in range(500):
                if number == 250:
                    wait_until(lambda: own_redis.client.zcard(KEYS.due) == 249)
                    own_redis.client.config_set("maxmemory", 1)
                batch.send("shop.remind", (number,), countdown=600 if number else 0)

    with pytest.raises(PublishRefused, match="250 refused") as caught:
        send_all()
    app.close()
    assert batch.result.confirmed == 250
    refused = caught.value.refused
    assert {"reached maxmemory" in message.reason for message in refused} == {True}
    assert sorted(json.loads(message.body)[0][0] for message in refused) == list(range(250, 500))
    own_redis.client.config_set("maxmemory", 0)
    assert own_redis.client.zcard(KEYS.due) == own_redis.client.hlen(KEYS.messages) == 249


def test_tasks_without_an_answer_are_reported_in_doubt(own_redis: PrivateRedis) -> None:
    app = make_app(own_redis.url)
    batch = bulk(app, timeout_seconds=0.5, window=200)

    def send_all() -> None:
        with batch:
            batch.send("shop.remind", (0,), countdown=600)
            wait_until(lambda: own_redis.client.zcard(KEYS.due) == 1)
            # The message is stored; its confirm may still be on its way.
            wait_until(
                lambda: not (batch._publisher.outbox._held or batch._publisher.outbox._unanswered)
            )
            # Scripts wait until the test ends the pause: a busy machine may take long to send.
            own_redis.client.client_pause(600_000, all=False)
            for number in range(1, 151):
                batch.send("shop.remind", (number,), countdown=600)

    with pytest.raises(PublishRefused, match="150 in doubt") as caught:
        send_all()
    own_redis.client.client_unpause()
    app.close()
    doubted = sorted(json.loads(message.body)[0][0] for message in caught.value.refused)
    assert doubted == list(range(1, 151))
    assert batch.result.confirmed == 1
