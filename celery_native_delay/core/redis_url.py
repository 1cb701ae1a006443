"""URLs of Redis, as Celery's users write them."""

from __future__ import annotations


def redis_py_url(url: str) -> str:
    """*url* as redis-py wants it; kombu's URLs of sockets name scheme and database otherwise."""
    if not url.startswith("redis+socket://"):
        return url
    return url.replace("redis+socket://", "unix://", 1).replace("virtual_host=", "db=")
