"""URLs of brokers and databases: without their password, and in the form that redis-py needs."""

from __future__ import annotations

import re

# The password of `user:password@`, whatever characters it has; and libpq's parameter `password=`.
_PASSWORD = re.compile(r"(?<=://)([^/:@?#]*):.*(?=@)|(?<=[?&]password=)[^&]*")


def without_password(url: str) -> str:
    """The *url* with ``**`` in place of its password."""
    return _PASSWORD.sub(lambda found: "**" if found[1] is None else f"{found[1]}:**", url)


def redis_py_url(url: str) -> str:
    """The *url* for redis-py, whose URLs of Unix sockets differ from kombu's."""
    if not url.startswith("redis+socket://"):
        return url
    return url.replace("redis+socket://", "unix://", 1).replace("virtual_host=", "db=")


def is_redis_url(url: str) -> bool:
    """True if the scheme of *url* is one of Redis."""
    return url.startswith(("redis://", "rediss://", "redis+socket://"))
