"""A Redis or Valkey that keeps something of ours: its version, its settings, its clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import time_ns
from typing import Any

from redis.exceptions import RedisError, ResponseError

from .errors import UnsupportedBroker
from .finding import ADVICE, UNCHECKED, WRONG, Finding, clock_finding

#: Seconds for which what was written to see whether that is possible stays.
_TRIED_SECONDS = 5

#: ZRANGE … BYSCORE, which kombu's own consumers use as well.
OLDEST_REDIS = (6, 2)


@dataclass(frozen=True)
class Server:
    """The part of ``INFO`` that matters here.

    *version* is () where the server tells none, *policy* and *aof* are None likewise.
    *configurable* says whether this user may change its configuration, as no user may on most
    hosted servers; None where that was not asked.
    """

    name: str = "Redis"
    version: tuple[int, ...] = ()
    cluster: bool = False
    policy: str | None = None
    aof: bool | None = None
    configurable: bool | None = None

    @classmethod
    def from_info(cls, info: Mapping[str, Any], *, configurable: bool | None = None) -> Server:
        """A server by redis-py's ``info()``; {} where asking is not allowed."""
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
    """Refuse a server that cannot hold delayed messages: older than 6.2, or a cluster.

    With a hash tag in kombu's ``global_keyprefix``, *prefix*, all keys share a slot, which is how
    some use kombu on a cluster.
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
    """Settings that may make a server lose what is *kept*, such as "delayed messages".

    Where it does not let its configuration be changed, that is advice: its host decides. Volatile
    policies drop only what *has_ttls*.
    """
    level = ADVICE if server.configurable is False else WRONG
    policy = server.policy
    if policy is None or server.aof is None:
        yield Finding(
            check,
            UNCHECKED,
            "maxmemory-policy and persistence: INFO does not tell them",
            "let this user do INFO, or make sure of noeviction and appendonly yes yourself",
        )
    dropping = ("allkeys-", "volatile-") if has_ttls else ("allkeys-",)
    if policy is not None and policy.startswith(dropping):
        yield Finding(
            check,
            level,
            f"maxmemory-policy is {policy}: {server.name} may drop {kept} when memory is short",
            f"set maxmemory-policy noeviction{_where(server)}",
        )
    elif policy is not None and policy.startswith("volatile-"):
        yield Finding(
            check,
            ADVICE,
            f"maxmemory-policy is {policy}: what has no TTL stays, queues with x-expires may go",
            f"set maxmemory-policy noeviction{_where(server)}",
        )
    if server.aof is False:
        yield Finding(
            check,
            level,
            f"appendonly is no: of {kept}, what came since the last snapshot is lost when "
            f"{server.name} restarts",
            f"set appendonly yes (appendfsync everysec){_where(server)}"
            + ("; else have a replica that takes over" if level == ADVICE else ""),
        )


def clocks(ahead_seconds: float, *, check: str = "clocks") -> Iterator[Finding]:
    """The fault of a server whose clock is *ahead_seconds* ahead of this machine's."""
    effect = "are put back once" if ahead_seconds > 0 else "come that much later"
    yield from clock_finding(
        "the Redis server's clock", ahead_seconds, f"delayed tasks {effect}", check=check
    )


def _where(server: Server) -> str:
    return ", where your provider lets you" if server.configurable is False else ""


def _has_hash_tag(prefix: str) -> bool:
    opening = prefix.find("{")
    return opening >= 0 and prefix.find("}", opening) > opening + 1


def server_of(client: Any, *, thoroughly: bool = False) -> Server:
    """The server as it describes itself now; little, where ``INFO`` is not allowed.

    *thoroughly*: also whether it can be configured.
    """
    configurable = _is_configurable(client) if thoroughly else None
    try:
        return Server.from_info(client.info(), configurable=configurable)
    except ResponseError:
        return Server(configurable=configurable)


def _is_configurable(client: Any) -> bool:
    """True if this user may look at the configuration: else it may not change it either."""
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
    """Seconds that the server's clock is ahead of ours; negative if it is behind."""
    before_us = time_ns() // 1000
    server_us = now_us(client)
    return (server_us - (before_us + time_ns() // 1000) / 2) / 1_000_000


def findings(client: Any, *, key: str, where: str) -> Iterator[Finding]:
    """Faults of a Redis beside the broker, in which records are kept with TTLs.

    *where* is its URL, without a password; *key* one that may be written, and goes by itself.
    """
    check, kept = "records", "what is known about waiting tasks"
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
        server = server_of(client, thoroughly=True)
        yield from keeping(server, check=check, kept=kept, has_ttls=True)
        yield from clocks(clock_ahead_seconds(client), check=check)
    except (RedisError, OSError) as exc:
        yield Finding(check, WRONG, f"{where}: {type(exc).__name__}: {exc}", "ask again")
