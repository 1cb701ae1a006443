"""What a Redis server says of itself, and what that means for messages that wait in it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...core.durations import duration
from ...core.errors import UnsupportedBroker

#: ZRANGE … BYSCORE, which kombu's own consumers use as well.
OLDEST_REDIS = (6, 2)


@dataclass(frozen=True)
class Server:
    """The part of ``INFO`` that matters here.

    *version* is () where the server tells none, *policy* and *aof* are None likewise.
    """

    name: str = "Redis"
    version: tuple[int, ...] = ()
    cluster: bool = False
    policy: str | None = None
    aof: bool | None = None

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> Server:
        """From redis-py's ``info()``; {} where asking is not allowed."""
        text = str(info.get("redis_version", ""))
        aof = info.get("aof_enabled")
        return cls(
            name="Valkey" if "valkey_version" in info else "Redis",
            version=tuple(int(part) for part in text.split(".") if part.isdigit()),
            cluster=bool(info.get("cluster_enabled")) or info.get("redis_mode") == "cluster",
            policy=info.get("maxmemory_policy"),
            aof=None if aof is None else bool(aof),
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


def dangers(server: Server) -> Iterator[str]:
    """What may make this server lose messages that wait, a sentence each."""
    if server.policy is not None and server.policy.startswith("allkeys-"):
        yield (
            f"maxmemory-policy is {server.policy}: Redis may drop delayed messages, and queues, "
            f"when memory is short; expected noeviction"
        )
    if server.aof is False:
        yield (
            "appendonly is no: what was delayed since the last snapshot is lost when Redis "
            "restarts; expected yes (appendfsync everysec)"
        )


#: Workers take a message that waited for due up to a second early.
_CLOCKS_MAY_DIFFER_SECONDS = 1.0


def clock_danger(ahead_seconds: float) -> Iterator[str]:
    """What the difference between the server's clock and this machine's does, if it matters."""
    if abs(ahead_seconds) > _CLOCKS_MAY_DIFFER_SECONDS:
        side = "ahead of" if ahead_seconds > 0 else "behind"
        effect = "are put back once" if ahead_seconds > 0 else "come that much later"
        yield (
            f"the Redis server's clock is {duration(abs(ahead_seconds))} {side} this machine's: "
            f"delayed tasks {effect}; expected both to follow one time server"
        )


def advice(server: Server) -> Iterator[str]:
    """What could be better, a sentence each."""
    if server.policy is not None and server.policy.startswith("volatile-"):
        yield (
            f"maxmemory-policy is {server.policy}: delayed messages have no TTL and stay, queues "
            f"with x-expires may go; noeviction is safer"
        )


def _has_hash_tag(prefix: str) -> bool:
    opening = prefix.find("{")
    return opening >= 0 and prefix.find("}", opening) > opening + 1
