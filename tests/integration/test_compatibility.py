"""What an earlier release has left in a Redis can be read by this one.

``python -m tests.integration.test_compatibility 2`` writes ``tests/unit/golden/redis_2.json``; see
``tests/unit/test_compatibility.py`` for when.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from celery_native_delay.store.opened import store_at
from celery_native_delay.testing import PrivateRedis, private_redis
from celery_native_delay.transports.redis.keys import RedisBrokerKeys, opened_entry
from celery_native_delay.transports.redis.store import RedisBrokerStore
from tests.integration.redis_traffic import row
from tests.unit.test_compatibility import (
    BODY,
    DESTINATION,
    FAR_US,
    GOLDEN,
    OWNER,
    assert_works,
    filled,
    in_the_past,
)

#: A key that expires sooner, in milliseconds, is gone when the next release comes.
SHORT_MS = 60_000

BROKER = RedisBrokerKeys("", "celery_delay")


def dumped(client: Any) -> list[list[Any]]:
    """The commands that write the lasting keys of a Redis."""
    keys = [key for key in sorted(client.keys()) if not 0 < client.pttl(key) < SHORT_MS]
    commands = [command_of(client, key, client.type(key).decode()) for key in keys]
    return [[w.decode() if isinstance(w, bytes) else w for w in command] for command in commands]


def command_of(client: Any, key: bytes, kind: str) -> list[Any]:
    match kind:
        case "string":
            return ["SET", key, client.get(key)]
        case "hash":
            return ["HSET", key, *chain(*sorted(client.hgetall(key).items()))]
        case "zset":
            scored = client.zrange(key, 0, -1, withscores=True)
            return ["ZADD", key, *chain(*((int(score), member) for member, score in scored))]
    raise ValueError(f"expected no {kind} of ours, got {key!r}")


@pytest.mark.redis
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("redis_*.json")), ids=lambda path: path.stem)
def test_this_release_works_on_the_redis_of_all_releases(
    path: Path, empty_redis: PrivateRedis
) -> None:
    """Rows, leases and waiting messages, as an earlier release has left them."""
    for command in json.loads(path.read_text()):
        empty_redis.client.execute_command(*command)
    with closing(store_at(empty_redis.url, OWNER, timeout_seconds=5)) as store:
        assert_works(store)
    waiting = RedisBrokerStore(empty_redis.client, BROKER)
    assert waiting.promote().delivered == 1
    assert empty_redis.client.lrange("eu", 0, -1) == [BODY.encode()]
    (kept,) = empty_redis.client.hvals(BROKER.messages)
    assert opened_entry(kept) == (DESTINATION, BODY.encode())


if __name__ == "__main__":
    with private_redis() as redis:
        with closing(store_at(redis.url, OWNER, timeout_seconds=5)) as made:
            filled(made)
        for name, due_us in {"due": 1, "waiting": FAR_US}.items():
            RedisBrokerStore(redis.client, BROKER).add([row(name, due_us, DESTINATION, BODY)])
        lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in dumped(redis.client))
    (GOLDEN / f"redis_{sys.argv[1]}.json").write_text(in_the_past(f"[\n{lines}\n]\n"))
