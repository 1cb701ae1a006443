"""Which servers can hold delayed messages, and which may lose them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from celery_native_delay import UnsupportedBroker
from celery_native_delay.finding import ADVICE, UNCHECKED, WRONG, Finding
from celery_native_delay.redis_server import (
    Server,
    check_server,
    clocks,
    keeping,
)

INFO = {
    "redis_version": "7.0.15",
    "redis_mode": "standalone",
    "cluster_enabled": 0,
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
}


def kept(server: Server, **options: bool) -> list[Finding]:
    return list(keeping(server, check="server", kept="delayed messages", **options))


def server(**info: Any) -> Server:
    return Server.from_info(INFO | info)


def test_a_server_as_it_should_be() -> None:
    found = server()
    check_server(found, prefix="")
    assert str(found) == "Redis 7.0.15"
    assert kept(found) == []


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
    (finding,) = kept(Server())
    assert finding.level == UNCHECKED


@pytest.mark.parametrize("info", [{"cluster_enabled": 1}, {"redis_mode": "cluster"}])
def test_a_cluster_is_refused_unless_all_keys_share_a_slot(info: dict[str, Any]) -> None:
    found = server(**info)
    for prefix in ("", "shop:", "{}:", "}{"):
        with pytest.raises(UnsupportedBroker, match="cluster mode"):
            check_server(found, prefix=prefix)
    check_server(found, prefix="{shop}:")


@pytest.mark.parametrize(
    ("info", "level", "problem"),
    [
        ({"maxmemory_policy": "allkeys-lru"}, WRONG, "maxmemory-policy is allkeys-lru"),
        ({"maxmemory_policy": "volatile-ttl"}, ADVICE, "maxmemory-policy is volatile-ttl"),
        ({"aof_enabled": 0}, WRONG, "appendonly is no"),
    ],
)
def test_what_may_lose_messages_is_said(info: dict[str, Any], level: str, problem: str) -> None:
    (finding,) = kept(server(**info))
    assert finding.problem.startswith(problem)
    assert finding.level == level


def test_what_has_a_ttl_is_lost_to_volatile_policies_as_well() -> None:
    """The records of a fence, and what is marked as cancelled in records."""
    (finding,) = kept(server(maxmemory_policy="volatile-lru"), has_ttls=True)
    assert finding.level == WRONG


def test_a_hosted_server_that_cannot_be_configured_is_given_advice_only() -> None:
    hosted = replace(server(aof_enabled=0, maxmemory_policy="allkeys-lru"), configurable=False)
    found = kept(hosted)
    assert {each.level for each in found} == {ADVICE}
    assert all("if your provider lets you" in each.remedy for each in found)


@pytest.mark.parametrize(
    ("ahead_seconds", "said"),
    [(0, None), (-1, None), (1, None), (1.5, "1.5 s ahead of"), (-72.25, "1 min 12 s behind")],
)
def test_clocks_that_differ_are_said_when_it_matters(
    ahead_seconds: float, said: str | None
) -> None:
    problems = [finding.problem for finding in clocks(ahead_seconds)]
    assert len(problems) == (said is not None)
    assert all(f"the Redis server's clock is {said} this machine's" in each for each in problems)
