"""Redis: ``delay declare | doctor | status | parked | purge``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_native_delay.testing import PrivateRedis
from celery_native_delay.transports.redis import parts
from celery_native_delay.transports.redis.parts import RedisAdminPart
from tests.integration.project import APP, Project
from tests.integration.redis_traffic import delaying, store_of
from tests.traffic import publish

pytestmark = pytest.mark.parametrize("server_name", ["redis"], indirect=True)

NAME = "celery_delay.v2"


@pytest.fixture
def shop(tmp_path: Path, empty_redis: PrivateRedis) -> Project:
    return Project(tmp_path).write(APP, empty_redis.url)


@pytest.fixture
def connection(empty_redis: PrivateRedis) -> Iterator[Any]:
    with delaying(empty_redis.url) as connection:
        yield connection


def park(connection: Any, server: PrivateRedis) -> None:
    """Park one message, whose destination is not a list."""
    server.client.set("poison", "no list")
    headers = {"task": "shop.remind", "id": "task-1"}
    publish(connection, "bad", "poison", delay=60, headers=headers)
    store = store_of(connection)
    store.client.zadd(store.keys.due, {store.client.zrange(store.keys.due, 0, 0)[0]: 0})
    assert store.promote().parked == 1


def test_doctor_finds_settings_that_may_lose_messages(
    shop: Project, empty_redis: PrivateRedis
) -> None:
    client = empty_redis.client
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("appendonly", "no")
    try:
        found = shop.told("doctor", status=1)["findings"]
    finally:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("appendonly", "yes")
    assert [(each["check"], each["problem"].split(":")[0]) for each in found] == [
        ("server", "maxmemory-policy is allkeys-lru"),
        ("server", "appendonly is no"),
        ("promoting", NAME),
    ]


def test_examine_finds_lost_messages(connection: Any) -> None:
    store = store_of(connection)
    store.client.zadd(store.keys.due, {"gone": 0})
    found = [each.problem for each in RedisAdminPart(connection.default_channel).examine()]
    assert f"{NAME}: 1 message(s) lost" in found


def test_declare_checks_the_server_and_status_counts(
    shop: Project, connection: Any, empty_redis: PrivateRedis
) -> None:
    assert shop.lines("declare")[0].startswith(f"{NAME}: nothing to declare, Redis ")
    assert shop.told("declare")["name"] == NAME
    waiting, due, overdue, parked, wrong, remedy = shop.delay("status").stdout.splitlines()
    assert (waiting, due) == ("waiting   0", "next due  -")
    assert (overdue, parked) == ("overdue   0", "parked    0")
    assert "nothing promotes" in wrong
    assert "run `celery -A PROJ delay promote`" in remedy
    park(connection, empty_redis)
    for seconds in (90, 200):
        publish(connection, "later", "jobs", delay=seconds)
    found = shop.told("status")
    lines = shop.lines("status")
    assert re.fullmatch(r"next due in (1 min( \d+ s)?|\d+ s)", lines[1])
    assert lines[2:4] == ["overdue 0", "parked 1"]
    assert [each["check"] for each in found.pop("findings")] == ["promoting", "parked"]
    within = found.pop("next_due_within_seconds")
    assert 30 < within <= 90
    assert found == {
        "name": NAME,
        "waiting": 2,
        "overdue": 0,
        "overdue_seconds": 0,
        "parked": 1,
        "promoting": False,
    }


def test_parked_messages_are_listed_requeued_and_purged(
    shop: Project, connection: Any, empty_redis: PrivateRedis
) -> None:
    park(connection, empty_redis)
    publish(connection, "later", "jobs", delay=90)
    listed = shop.told("parked", "list")
    (message,) = listed["messages"]
    assert (listed["parked"], message.pop("due") is not None) == (1, True)
    assert message == {
        "task": "shop.remind",
        "id": "task-1",
        "exchange": "",
        "routing_key": "poison",
    }

    outcome = shop.told("parked", "requeue")
    assert (outcome["delivered"], outcome["still_parked"]) == (0, 1)
    empty_redis.client.delete("poison")
    assert shop.lines("parked", "requeue")[0].startswith("1 parked message(s) delivered")
    assert empty_redis.client.llen("poison") == 1

    empty_redis.client.delete("poison")
    park(connection, empty_redis)
    assert shop.told("purge", "--force") == {"name": NAME, "purged": 1}
    assert shop.told("parked", "purge", "--force") == {"purged": 1}
    assert shop.told("parked", "purge", "--force") == {"purged": 0}


def test_a_lost_message_does_not_stop_migrate(connection: Any) -> None:
    for number in range(6):
        publish(connection, number, "jobs", delay=60 + number)
    store = store_of(connection)
    first = store.client.zrange(store.keys.due, 0, 0)[0]
    store.client.hdel(store.keys.messages, first)
    source = parts.RedisSource(connection.default_channel)
    assert [source.done() for _ in source.found()] == [True] * 5
    assert store.census().waiting == 1
