"""Asks a Redis what it is and whether it takes what is to be kept there: broker, ledger, fence."""

from __future__ import annotations

from collections.abc import Iterator
from time import time_ns
from typing import Any

from redis.exceptions import RedisError, ResponseError

from .core.finding import WRONG, Finding
from .core.redis_server import Server, clocks, keeping

#: Seconds for which what was written to see whether that is possible stays.
_TRIED_SECONDS = 5


def server_of(client: Any, *, configurable: bool | None = None) -> Server:
    """What the server says of itself now; little, where ``INFO`` is not allowed."""
    try:
        return Server.from_info(client.info(), configurable=configurable)
    except ResponseError:
        return Server(configurable=configurable)


def is_configurable(client: Any) -> bool:
    """Whether this user may look at the configuration: who may not will not change it either."""
    try:
        client.config_get("appendonly")
    except ResponseError:
        return False
    return True


def now_us(client: Any) -> int:
    """Microseconds since the epoch by the server's clock."""
    seconds, microseconds = client.time()
    return int(seconds) * 1_000_000 + int(microseconds)


def clock_ahead_seconds(client: Any) -> float:
    """How far the server's clock is ahead of ours; negative if it is behind."""
    before_us = time_ns() // 1000
    server_us = now_us(client)
    return (server_us - (before_us + time_ns() // 1000) / 2) / 1_000_000


def findings(client: Any, *, key: str, check: str, kept: str, where: str) -> Iterator[Finding]:
    """What is wrong with a Redis beside the broker, in which something is kept with TTLs.

    Args:
        key: one that may be written, and goes by itself.
        check: of the findings.
        kept: what lies there.
        where: its URL, without a password.
    """
    try:
        client.ping()
    except (RedisError, OSError) as exc:
        yield Finding(
            check,
            WRONG,
            f"{where} does not serve: {type(exc).__name__}: {exc}",
            "start it, or correct host, user and password of its URL, in workers and producers",
        )
        return
    try:
        client.set(key, "", ex=_TRIED_SECONDS)
    except (RedisError, OSError) as exc:
        yield Finding(
            check,
            WRONG,
            f"{where} takes nothing: {type(exc).__name__}: {exc}",
            "name a server in its URL that may be written to, no replica, with memory and disk "
            "left and a user who may",
        )
    try:
        server = server_of(client, configurable=is_configurable(client))
        yield from keeping(server, check=check, kept=kept, has_ttls=True)
        yield from clocks(clock_ahead_seconds(client), check=check)
    except (RedisError, OSError) as exc:
        yield Finding(check, WRONG, f"{where}: {type(exc).__name__}: {exc}", "ask again")
