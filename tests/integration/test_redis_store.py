"""The store in Redis: messages wait unchanged, and are handed over or parked when due."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from celery_native_delay import BrokerFull, NotPermitted
from celery_native_delay.testing import PrivateRedis
from celery_native_delay.transports.redis.keys import Destination, RedisBrokerKeys
from celery_native_delay.transports.redis.store import BATCH, RedisBrokerStore, Rounds
from tests.integration.redis_traffic import entries, row

KEYS = RedisBrokerKeys("", "tests")


@pytest.fixture
def store(empty_redis: PrivateRedis) -> RedisBrokerStore:
    return RedisBrokerStore(empty_redis.client, KEYS)


def add(
    store: RedisBrokerStore, name: str, *, to: str = "jobs", in_ms: int = 0, **more: Any
) -> None:
    """Store a message whose body is its name."""
    store.add([row(name, store.now_us() + in_ms * 1000, Destination((to,), **more), name)])


def queue(store: RedisBrokerStore, name: str = "jobs") -> list[str]:
    """A queue's messages in the order of delivery."""
    return [envelope.decode() for envelope in reversed(store.client.lrange(name, 0, -1))]


def test_a_due_time_is_kept_to_the_microsecond(store: RedisBrokerStore) -> None:
    """The due time is not rounded."""
    due_us = store.now_us() + 200_000 + 1
    store.add([row("one", due_us, Destination(("jobs",)), "one")])
    handed = store.promote()
    assert handed.next_us == due_us
    assert handed.wait_us == due_us - handed.now_us
    while not handed.taken:
        assert handed.now_us < due_us
        handed = store.promote()
    assert handed.now_us >= due_us


def test_messages_for_many_queues_keep_their_order_in_each(store: RedisBrokerStore) -> None:
    names = ["jobs", "mail", "jobs:10"]
    for number in range(60):
        add(store, f"{number:02}", to=names[number % 7 % 3])
    assert store.promote().delivered == 60
    for at, name in enumerate(names):
        assert queue(store, name) == [f"{n:02}" for n in range(60) if n % 7 % 3 == at]


def test_pipelined_rounds_share_the_due_messages(store: RedisBrokerStore) -> None:
    """Also if the server does not know the script yet."""
    for number in range(BATCH + 1):
        add(store, f"{number:03}")
    store.client.script_flush()
    rounds = Rounds(store.client.connection_pool.make_connection(), KEYS)
    rounds.connect()
    for _ in range(3):
        rounds.ask()
    assert [rounds.answer().taken for _ in range(3)] == [BATCH, 1, 0]
    assert rounds.asked_count == 0
    rounds.close()
    assert queue(store) == [f"{number:03}" for number in range(BATCH + 1)]


@pytest.mark.parametrize("key", ["with space", "line\nbreak", "jobs\x06\x163", "ünïcode", "{x}:y"])
def test_a_queue_may_have_any_name(store: RedisBrokerStore, key: str) -> None:
    add(store, "one", to=key)
    add(store, "two", to="jobs")
    store.promote()
    assert queue(store, key) == ["one"]
    assert queue(store) == ["two"]


def test_a_due_time_without_a_message_is_skipped(store: RedisBrokerStore) -> None:
    add(store, "one")
    store.client.zadd(KEYS.due, {"nobody": 0})
    handed = store.promote()
    assert (handed.taken, handed.delivered, handed.parked) == (2, 1, 0)
    assert store.census().waiting == 0


def test_only_a_new_first_due_time_sets_the_wake_up_marker(store: RedisBrokerStore) -> None:
    def marked() -> bool:
        return bool(store.client.zpopmin(KEYS.wake))

    add(store, "first", in_ms=1000)
    assert marked()
    add(store, "later", in_ms=2000)
    assert not marked()
    add(store, "sooner", in_ms=500)
    assert marked()


def test_messages_for_a_key_of_the_wrong_type_are_parked_and_others_delivered(
    store: RedisBrokerStore,
) -> None:
    store.client.set("poison", "no list")
    for number in range(10):
        add(store, f"bad {number}", to="poison")
        add(store, f"good {number}")
    handed = store.promote()
    assert (handed.taken, handed.delivered, handed.parked) == (20, 10, 10)
    assert "WRONGTYPE" in handed.refusal
    assert queue(store) == [f"good {number}" for number in range(10)]
    assert store.census().parked == 10
    assert store.promote().taken == 0, "nothing is tried again and again"


def test_a_delivery_extends_the_ttl_of_all_priority_lists(store: RedisBrokerStore) -> None:
    store.client.lpush("jobs:9", "another")
    store.client.lpush("other", "not ours")
    destination = Destination(("jobs", "jobs:3", "jobs:9"), ttl_ms=50_000)
    store.add([row("one", store.now_us(), destination, "one")])
    store.promote()
    assert 40_000 < store.client.pttl("jobs") <= 50_000
    assert 40_000 < store.client.pttl("jobs:9") <= 50_000
    assert store.client.pttl("other") == -1


@pytest.fixture
def full(store: RedisBrokerStore) -> Iterator[RedisBrokerStore]:
    """A store with 500 due messages, on a full server."""
    for number in range(500):
        add(store, f"{number:03}")
    store.client.config_set("maxmemory", 1)
    yield store
    store.client.config_set("maxmemory", 0)


def test_a_full_server_refuses_messages_and_parks_and_hands_over_waiting_ones(
    full: RedisBrokerStore,
) -> None:
    with pytest.raises(BrokerFull, match="reached maxmemory"):
        add(full, "one more")
    assert full.census().waiting == 500, "nothing was stored"
    full.client.config_set("maxmemory", 0)
    full.client.set("poison", "no list")
    add(full, "bad", to="poison", in_ms=-60_000)
    full.client.config_set("maxmemory", 1)
    handed = full.promote()
    assert (handed.delivered, handed.parked) == (BATCH - 1, 1)
    while full.promote().taken:
        pass
    assert len(queue(full)) == 500
    assert entries(full) == 1


@pytest.mark.parametrize("rights", ["~jobs +@all", "~* +@all -zadd"])
def test_missing_permissions_are_named_in_the_error(
    store: RedisBrokerStore, empty_redis: PrivateRedis, rights: str
) -> None:
    """For the keys of a script, and for a command in it."""
    client = empty_redis.client
    client.execute_command(*["ACL", "SETUSER", "guest", "on", "nopass", *rights.split()])
    guest = type(client)(unix_socket_path=str(empty_redis.socket), username="guest", password="x")
    with closing(guest), pytest.raises(NotPermitted, match=r"~tests\.v2\.\*"):
        RedisBrokerStore(guest, KEYS).add([row("one", 0, Destination(("jobs",)), "x")])
    client.execute_command("ACL", "DELUSER", "guest")


def test_purge_deletes_waiting_or_parked_messages(store: RedisBrokerStore) -> None:
    store.client.set("poison", "no list")
    add(store, "bad", to="poison")
    store.promote()
    for number in range(1500):
        add(store, f"{number}", in_ms=60_000)
    assert store.purge(parked=False) == 1500
    assert entries(store) == store.census().parked == 1
    assert store.purge(parked=True) == 1
    assert entries(store) == 0
