"""Checks of a Redis server: can it hold delayed messages, and may it lose them?"""

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


def test_a_good_server_has_no_findings() -> None:
    found = server()
    check_server(found, prefix="")
    assert str(found) == "Redis 7.0.15"
    assert kept(found) == []


def test_valkey_is_named_with_its_redis_version() -> None:
    assert str(server(redis_version="7.2.4", valkey_version="9.1.2")) == "Valkey 7.2.4"


def test_an_old_server_is_refused_with_the_remedy() -> None:
    check_server(server(redis_version="6.2.0"), prefix="")
    for version in ("5.0.14", "6.1.9"):
        with pytest.raises(UnsupportedBroker, match=rf"6\.2 or newer .* {version}: upgrade"):
            check_server(server(redis_version=version), prefix="")


def test_a_server_without_info_is_accepted() -> None:
    """Proxies have no INFO, and an ACL may forbid it."""
    check_server(Server.from_info({}), prefix="")
    (finding,) = kept(Server())
    assert finding.level == UNCHECKED


def test_a_cluster_is_refused_unless_all_keys_share_a_slot() -> None:
    for found in (server(cluster_enabled=1), server(redis_mode="cluster")):
        for prefix in ("", "shop:", "{}:", "}{"):
            with pytest.raises(UnsupportedBroker, match="cluster mode"):
                check_server(found, prefix=prefix)
        check_server(found, prefix="{shop}:")


def test_settings_that_may_lose_messages_are_found() -> None:
    """Claims of tasks that are once, and the ids of cancelled tasks, have a TTL."""
    lru, ttl = ({"maxmemory_policy": policy} for policy in ("allkeys-lru", "volatile-ttl"))
    for info, has_ttls, level, problem in (
        (lru, False, WRONG, "maxmemory-policy is allkeys-lru"),
        (ttl, False, ADVICE, "maxmemory-policy is volatile-ttl"),
        (ttl, True, WRONG, "maxmemory-policy is volatile-ttl"),
        ({"aof_enabled": 0}, False, WRONG, "appendonly is no"),
    ):
        (finding,) = kept(server(**info), has_ttls=has_ttls)
        assert finding.problem.startswith(problem)
        assert finding.level == level


def test_a_hosted_server_that_cannot_be_configured_is_given_advice_only() -> None:
    hosted = replace(server(aof_enabled=0, maxmemory_policy="allkeys-lru"), configurable=False)
    found = kept(hosted)
    assert {each.level for each in found} == {ADVICE}
    assert all("if your provider lets you" in each.remedy for each in found)


@pytest.mark.parametrize(
    ("ahead_seconds", "said"),
    [(0, None), (-1, None), (1, None), (1.5, "1.5 s ahead of"), (-72.25, "1 min 12 s behind")],
)
def test_clocks_that_differ_by_more_than_a_second_are_found(
    ahead_seconds: float, said: str | None
) -> None:
    problems = [finding.problem for finding in clocks(ahead_seconds)]
    assert len(problems) == (said is not None)
    assert all(f"the Redis server's clock is {said} this machine's" in each for each in problems)
