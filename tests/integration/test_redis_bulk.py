"""``bulk(app)`` on Redis: each task is stored once, in doubt or refused.

tests/conformance has the tests for all brokers.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import pytest
from celery import Celery

from celery_native_delay import PublishRefused, install
from celery_native_delay.bulk import bulk
from celery_native_delay.testing import PrivateRedis
from celery_native_delay.transports.redis.keys import RedisBrokerKeys
from tests.integration.redis_traffic import connector, promoting
from tests.waiting import wait_until

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
def app(empty_redis: PrivateRedis) -> Iterator[Celery]:
    app = make_app(empty_redis.url)
    yield app
    app.close()


def numbers(redis: PrivateRedis, queue: str = "plain") -> list[int]:
    """The first argument of each task in *queue*."""
    bodies = [b64decode(json.loads(text)["body"]) for text in redis.client.lrange(queue, 0, -1)]
    return sorted(json.loads(body)[0][0] for body in bodies)


@pytest.mark.ci
def test_killed_connections_neither_lose_nor_duplicate_tasks(
    empty_redis: PrivateRedis, app: Celery
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
        with bulk(app, window=300) as batch:
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


def test_flushed_scripts_are_sent_again(empty_redis: PrivateRedis, app: Celery) -> None:
    with bulk(app, window=250) as batch:
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
