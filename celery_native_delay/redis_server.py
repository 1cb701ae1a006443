"""Checks of a Redis or Valkey server: its version, its settings and its clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import time_ns
from typing import Any

from redis.exceptions import RedisError, ResponseError

from .errors import UnsupportedBroker
from .finding import ADVICE, UNCHECKED, WRONG, Finding, clock_finding

#: TTL of the key that a check writes, in seconds.
_TRIED_SECONDS = 5

#: A script that calls what other scripts do. KEYS a key to write. ARGV its TTL in seconds.
_TRIAL = "redis.call('TIME') redis.call('SET', KEYS[1], '', 'EX', ARGV[1])"

#: What a user of Redis needs, on the keys of a namespace. Redis brokers need more.
RIGHTS = "+@connection +@read +@write +@scripting +info +time"

#: The first version with ZRANGE … BYSCORE. kombu's own consumers need this command, too.
OLDEST_REDIS = (6, 2)


@dataclass(frozen=True)
class Server:
    """The version and settings of a Redis or Valkey server.

    - *version*: for example (7, 2, 4); () if unknown.
    - *policy*: the server's ``maxmemory-policy``; None if unknown.
    - *aof*: True if the server's ``appendonly`` is "yes"; None if unknown.
    - *configurable*: True if the client's user may call ``CONFIG GET``; None if unknown.
    """

    name: str = "Redis"
    version: tuple[int, ...] = ()
    cluster: bool = False
    policy: str | None = None
    aof: bool | None = None
    configurable: bool | None = None

    @classmethod
    def from_info(cls, info: Mapping[str, Any], *, configurable: bool | None = None) -> Server:
        """Convert redis-py's ``info()`` to a :class:`Server`; missing values are unknown."""
        text = str(info.get("redis_version", ""))
        aof = info.get("aof_enabled")
        return cls(
            name="Valkey" if "valkey_version" in info else "Redis",
            version=tuple(int(part) for part in text.split(".") if part.isdigit()),
            cluster=bool(info.get("cluster_enabled")) or info.get("redis_mode") == "cluster",
            policy=info.get("maxmemory_policy"),
            aof=None if aof is None else bool(aof),
            configurable=configurable,
        )

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}".strip()


def check_server(server: Server, *, prefix: str) -> None:
    """Raise UnsupportedBroker if the server is older than Redis 6.2, or in cluster mode.

    The only exception: a cluster is allowed if *prefix* (kombu's ``global_keyprefix``) has a hash
    tag, such as ``{queue}:``.
    """
    if server.version and server.version < OLDEST_REDIS:
        raise UnsupportedBroker(
            f"expected Redis 6.2 or newer (or Valkey), found {server}: upgrade the broker, or set "
            f"native_delay_enabled = False"
        )
    if server.cluster and not _has_hash_tag(prefix):
        raise UnsupportedBroker(
            f"{server} runs in cluster mode, which kombu does not support: use a single server or "
            f"Sentinel, put a hash tag such as {{queue}}: into the transport option "
            f"global_keyprefix, or set native_delay_enabled = False"
        )


def keeping(server: Server, *, check: str, kept: str, has_ttls: bool = False) -> Iterator[Finding]:
    """Yield a problem for each Redis setting that may cause a loss of data.

    *check* is the name of the check. *kept* names the data, such as "delayed messages". *has_ttls*
    is True if the data has TTLs. Redis may delete such data under a ``volatile-…`` eviction
    policy.
    """
    level = ADVICE if server.configurable is False else WRONG
    policy = server.policy
    if policy is None or server.aof is None:
        yield Finding(
            check,
            UNCHECKED,
            "maxmemory-policy and appendonly are unknown: INFO does not show them",
            "let this user call INFO, or make sure of noeviction and appendonly yes yourself",
        )
    dropping = ("allkeys-", "volatile-") if has_ttls else ("allkeys-",)
    if policy is not None and policy.startswith(dropping):
        yield Finding(
            check,
            level,
            f"maxmemory-policy is {policy}: {server.name} may delete {kept} when memory is short",
            f"set maxmemory-policy noeviction{_where(server)}",
        )
    elif policy is not None and policy.startswith("volatile-"):
        yield Finding(
            check,
            ADVICE,
            f"maxmemory-policy is {policy}: queues with x-expires may be deleted",
            f"set maxmemory-policy noeviction{_where(server)}",
        )
    if server.aof is False:
        yield Finding(
            check,
            level,
            f"appendonly is no: a restart of {server.name} loses {kept} since its last snapshot",
            f"set appendonly yes (appendfsync everysec){_where(server)}"
            + ("; or run a replica that takes over" if level == ADVICE else ""),
        )


def clocks(ahead_seconds: float, *, check: str = "clocks") -> Iterator[Finding]:
    """Yield a problem if the Redis server's and this machine's clock differ by over a second.

    *ahead_seconds* is the result of :func:`clock_ahead_seconds`. *check* is the name of the check.
    """
    effect = "arrive early and are put back once" if ahead_seconds > 0 else "arrive that much later"
    yield from clock_finding(
        "the Redis server's clock", ahead_seconds, f"delayed tasks {effect}", check=check
    )


def _where(server: Server) -> str:
    return ", if your provider lets you" if server.configurable is False else ""


def _has_hash_tag(prefix: str) -> bool:
    opening = prefix.find("{")
    return opening >= 0 and prefix.find("}", opening) > opening + 1


def server_of(client: Any, *, thoroughly: bool = False) -> Server:
    """Ask the Redis server for its ``INFO``; *thoroughly* also tries ``CONFIG GET``."""
    configurable = _is_configurable(client) if thoroughly else None
    try:
        return Server.from_info(client.info(), configurable=configurable)
    except ResponseError:
        return Server(configurable=configurable)


def _is_configurable(client: Any) -> bool:
    """Return True if the client's user may read the configuration of the Redis server."""
    try:
        client.config_get("appendonly")
    except ResponseError:
        return False
    return True


def now_us(client: Any) -> int:
    seconds, microseconds = client.time()
    return int(seconds) * 1_000_000 + int(microseconds)


def clock_ahead_seconds(client: Any) -> float:
    """Return the server's time minus this machine's time, in seconds."""
    before_us = time_ns() // 1000
    server_us = now_us(client)
    return (server_us - (before_us + time_ns() // 1000) / 2) / 1_000_000


def findings(client: Any, *, key: str, where: str) -> Iterator[Finding]:
    """Yield the problems of a Redis server that is a store of waiting tasks.

    The check writes a test value to *key*. *where* is the server's URL without a password.
    """
    check = "store"
    try:
        client.eval(_TRIAL, 1, key, _TRIED_SECONDS)
    except ResponseError as exc:
        problem = f"{where} cannot be written to: {type(exc).__name__}: {exc}"
        remedy = f"name a primary with free memory and disk, and grant its user {RIGHTS}"
        yield Finding(check, WRONG, problem, remedy)
    except (RedisError, OSError) as exc:
        problem = f"{where} does not answer: {type(exc).__name__}: {exc}"
        remedy = "start it, or correct host, user and password of its URL, in workers and producers"
        yield Finding(check, WRONG, problem, remedy)
        return
    try:
        server = server_of(client, thoroughly=True)
        yield from keeping(server, check=check, kept="waiting tasks", has_ttls=True)
        yield from clocks(clock_ahead_seconds(client), check=check)
    except (RedisError, OSError) as exc:
        yield Finding(
            check, WRONG, f"{where}: {type(exc).__name__}: {exc}", f"grant its user {RIGHTS}"
        )
