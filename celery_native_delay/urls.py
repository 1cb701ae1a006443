"""URLs of brokers and stores: as they may be shown, and as redis-py takes them."""

from __future__ import annotations

import re

# The password of `user:password@`, whatever stands in it: rather too much is hidden; and one given
# as a parameter, as libpq takes it.
_PASSWORD = re.compile(r"(?<=://)([^/:@?#]*):.*(?=@)|(?<=[?&]password=)[^&]*")


def without_password(url: str) -> str:
    """*url* with ``**`` where its password stands; all else of it tells it from others."""
    return _PASSWORD.sub(lambda found: "**" if found[1] is None else f"{found[1]}:**", url)


def redis_py_url(url: str) -> str:
    """*url* as redis-py wants it; kombu's URLs of sockets name scheme and database otherwise."""
    if not url.startswith("redis+socket://"):
        return url
    return url.replace("redis+socket://", "unix://", 1).replace("virtual_host=", "db=")


def is_redis_url(url: str) -> bool:
    """True if *url* leads to a Redis, by its scheme."""
    return url.startswith(("redis://", "rediss://", "redis+socket://"))
