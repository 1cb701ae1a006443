"""Waiting tasks on a Redis broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery import Celery
from kombu import Queue

from celery_native_delay import CannotDelay, Delay, InvalidQuery, Query, delay_headers, install
from celery_native_delay.bulk import bulk
from celery_native_delay.testing import PrivateRedis
from tests.integration.redis_traffic import promoting, store_of
from tests.traffic import JOBS, inbox, send_task

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
