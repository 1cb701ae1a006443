"""Which servers can hold delayed messages, and which may lose them."""

from __future__ import annotations

from typing import Any

import pytest

from celery_native_delay import UnsupportedBroker
from celery_native_delay.transports.redis.server import (
    Server,
    advice,
    check_server,
    clock_danger,
    dangers,
)

INFO = {
    "redis_version": "7.0.15",
    "redis_mode": "standalone",
    "cluster_enabled": 0,
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
}


def server(**info: Any) -> Server:
    return Server.from_info(INFO | info)


def test_a_server_as_it_should_be() -> None:
    found = server()
    check_server(found, prefix="")
    assert str(found) == "Redis 7.0.15"
    assert list(dangers(found)) == list(advice(found)) == []


def test_valkey_tells_its_own_name_and_the_version_it_is_compatible_with() -> None:
    found = server(redis_version="7.2.4", valkey_version="9.1.2")
    check_server(found, prefix="")
    assert str(found) == "Valkey 7.2.4"


@pytest.mark.parametrize("version", ["5.0.14", "6.0.16", "6.1.9"])
def test_an_old_server_is_refused_with_a_way_out(version: str) -> None:
    with pytest.raises(UnsupportedBroker) as refused:
        check_server(server(redis_version=version), prefix="")
    assert str(refused.value) == (
        f"expected Redis 6.2 or newer (or Valkey), found Redis {version}: upgrade the broker, or "
        f"set native_delay_enabled = False"
    )


@pytest.mark.parametrize("version", ["6.2.0", "6.2.14", "7.2.4", "8.0.1", "255.255.255"])
def test_newer_servers_are_taken(version: str) -> None:
    check_server(server(redis_version=version), prefix="")


def test_a_server_that_tells_nothing_is_taken() -> None:
    """Proxies have no INFO, and a strict ACL forbids it."""
    check_server(Server.from_info({}), prefix="")
    assert list(dangers(Server())) == []


@pytest.mark.parametrize("info", [{"cluster_enabled": 1}, {"redis_mode": "cluster"}])
def test_a_cluster_is_refused_unless_all_keys_share_a_slot(info: dict[str, Any]) -> None:
    found = server(**info)
    for prefix in ("", "shop:", "{}:", "}{"):
        with pytest.raises(UnsupportedBroker, match="cluster mode"):
            check_server(found, prefix=prefix)
    check_server(found, prefix="{shop}:")


@pytest.mark.parametrize(
    ("info", "dangerous", "advised"),
    [
        ({"maxmemory_policy": "allkeys-lru"}, ["maxmemory-policy is allkeys-lru"], []),
        ({"maxmemory_policy": "volatile-ttl"}, [], ["maxmemory-policy is volatile-ttl"]),
        ({"aof_enabled": 0}, ["appendonly is no"], []),
    ],
)
def test_what_may_lose_messages_is_said(
    info: dict[str, Any], dangerous: list[str], advised: list[str]
) -> None:
    for found, expected in (
        (dangers(server(**info)), dangerous),
        (advice(server(**info)), advised),
    ):
        for sentence, beginning in zip(found, expected, strict=True):
            assert sentence.startswith(beginning)


@pytest.mark.parametrize(
    ("ahead_seconds", "said"),
    [(0, None), (-1, None), (1, None), (1.5, "1.5 s ahead of"), (-72.25, "1 min 12 s behind")],
)
def test_clocks_that_differ_are_said_when_it_matters(
    ahead_seconds: float, said: str | None
) -> None:
    sentences = list(clock_danger(ahead_seconds))
    assert len(sentences) == (said is not None)
    assert all(f"the Redis server's clock is {said} this machine's" in each for each in sentences)
