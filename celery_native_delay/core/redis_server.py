"""What a Redis server says of itself, and what that means for what waits in it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .clocks import clock_finding
from .errors import UnsupportedBroker
from .finding import ADVICE, UNCHECKED, WRONG, Finding

#: ZRANGE … BYSCORE, which kombu's own consumers use as well.
OLDEST_REDIS = (6, 2)


@dataclass(frozen=True)
class Server:
    """The part of ``INFO`` that matters here.

    *version* is () where the server tells none, *policy* and *aof* are None likewise.
    *configurable* says whether this user may change its configuration, as no user may on most
    hosted servers; None where nobody has asked.
    """

    name: str = "Redis"
    version: tuple[int, ...] = ()
    cluster: bool = False
    policy: str | None = None
    aof: bool | None = None
    configurable: bool | None = None

    @classmethod
    def from_info(cls, info: Mapping[str, Any], *, configurable: bool | None = None) -> Server:
        """From redis-py's ``info()``; {} where asking is not allowed."""
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
    """Refuse a server that cannot hold delayed messages.

    Args:
        prefix: kombu's ``global_keyprefix``; with a hash tag in it all keys share a slot, which is
            how some use kombu on a cluster.

    Raises:
        UnsupportedBroker: older than 6.2, or a cluster.
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
    """What may make a server lose what it is to keep.

    Where it does not let its configuration be changed, that is advice: whoever hosts it decides.

    Args:
        check: of the findings.
        kept: what lies there, such as "delayed messages".
        has_ttls: whether some of it has a TTL, so that volatile policies drop it, too.
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
    """What it does that the server's clock is *ahead_seconds* ahead of this machine's."""
    effect = "are put back once" if ahead_seconds > 0 else "come that much later"
    yield from clock_finding(
        "the Redis server's clock", ahead_seconds, f"delayed tasks {effect}", check=check
    )


def _where(server: Server) -> str:
    return ", where your provider lets you" if server.configurable is False else ""


def _has_hash_tag(prefix: str) -> bool:
    opening = prefix.find("{")
    return opening >= 0 and prefix.find("}", opening) > opening + 1
