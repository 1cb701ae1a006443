"""The client of private servers: redis-py, from the extra `redis`, imported when first needed."""

from __future__ import annotations

from typing import Any


def client_of(**server: Any) -> Any:
    """A client of the *server* that these keywords of `redis.Redis` name.

    It fails at once without an answer; by default redis-py tries again for some seconds.
    """
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return Redis(**server, retry=Retry(NoBackoff(), 0))


def answers(client: Any) -> bool:
    """True if the server is up and serves; while it loads its data it refuses."""
    from redis.exceptions import RedisError

    try:
        return bool(client.ping())
    except RedisError:
        return False
