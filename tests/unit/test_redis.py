"""Redis without a server: names, checks of its settings, and promoters that stand by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import ConnectionPool

from celery_native_delay import UnsupportedBroker
from celery_native_delay.finding import ADVICE, UNCHECKED, WRONG, Finding
from celery_native_delay.records.redis_link import redis_client
from celery_native_delay.redis_server import Server, check_server, clocks, keeping
from celery_native_delay.transports.redis import promoter as module
from celery_native_delay.transports.redis.keys import (
    Destination,
    RedisBrokerKeys,
    entry_of,
    member_of,
    opened_entry,
)
from celery_native_delay.transports.redis.promoter import RedisPromoter
from celery_native_delay.transports.redis.store import HandedOver
from celery_native_delay.urls import redis_py_url

# ---- names and URLs ------------------------------------------------------------------------------


def test_the_names_of_version_2_are_frozen() -> None:
    """Messages in production wait in these keys. To change a name, add a version."""
    keys = RedisBrokerKeys("shop:", "celery_delay")
    assert [keys.due, keys.messages, keys.wake, keys.parked, keys.ids] == [
        "shop:celery_delay.v2.due",
        "shop:celery_delay.v2.messages",
        "shop:celery_delay.v2.wake",
        "shop:celery_delay.v2.parked",
        "shop:celery_delay.v2.ids",
    ]
    message = {"headers": {"id": "task-1"}, "properties": {"delivery_tag": "tag-1"}}
    assert member_of(message, "celery") == "task-1:u2yCm81Mnozy"


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(
    st.builds(
        Destination,
        st.lists(names, min_size=1, max_size=5).map(tuple),
        st.integers(0, 10**10),
        st.booleans(),
    ),
    names,
)
def test_an_entry_survives_encoding_and_decoding(destination: Destination, envelope: str) -> None:
    opened = opened_entry(entry_of(destination, envelope).encode())
    assert opened == (destination, envelope.encode())


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis+socket:///run/r.sock", {"path": "/run/r.sock"}),
        ("redis+socket:///run/r.sock?virtual_host=3", {"path": "/run/r.sock", "db": 3}),
        (
            "redis+socket://:secret@/run/r.sock?virtual_host=3",
            {"path": "/run/r.sock", "db": 3, "password": "secret"},
        ),
        ("rediss://host?ssl_cert_reqs=CERT_REQUIRED", {"ssl_cert_reqs": "required"}),
        ("redis://:secret@host:6380/2", {"host": "host", "port": 6380, "db": 2}),
    ],
)
def test_redis_py_connects_where_kombu_does(url: str, expected: dict[str, object]) -> None:
    options = ConnectionPool.from_url(redis_py_url(url)).connection_kwargs
    assert expected.items() <= options.items()


# ---- checks of a server --------------------------------------------------------------------------


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


def test_a_store_reads_bytes_although_its_url_asks_for_texts() -> None:
    assert not redis_client("redis://host/1?decode_responses=True").get_encoder().decode_responses


def test_a_good_server_has_no_findings_and_an_old_one_is_refused_with_the_remedy() -> None:
    found = server()
    check_server(found, prefix="")
    assert (str(found), kept(found)) == ("Redis 7.0.15", [])
    assert str(server(redis_version="7.2.4", valkey_version="9.1.2")) == "Valkey 7.2.4"
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
def test_clocks_more_than_a_second_apart_are_found(ahead_seconds: float, said: str | None) -> None:
    problems = [finding.problem for finding in clocks(ahead_seconds)]
    assert len(problems) == (said is not None)
    assert all(f"the Redis server's clock is {said} this machine's" in each for each in problems)


# ---- idle promoters ------------------------------------------------------------------------------


#: Between two messages, in microseconds.
STEP_US = 5_000


@pytest.mark.parametrize(
    ("takes", "woken", "lags"),
    [
        # One of several promoters does the work: four that look cost Redis four times.
        ([1, 0, 0, 0, 0, 0, 0, 0, 0], None, [0, 1, 2, 4, 8, 16, 32, 50, 50]),
        # The promoter that works is on time, and one that was woken: a message wakes only one.
        ([1, 0, 0, 1, 1, 0], None, [0, 1, 2, 0, 0, 1]),
        ([1, 0, 0, 0], 2, [0, 1, 2, 0]),
    ],
)
def test_a_promoter_that_finds_nothing_lags_longer_each_time(
    takes: list[int], woken: int | None, lags: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The milliseconds by which it lags behind the next due time, round by round.

    With scripted answers: on a busy machine the order of real ones would be random.
    """
    monkeypatch.setattr(module, "monotonic", lambda: 0.0)
    answers = [
        HandedOver(taken, taken, 0, number * STEP_US, (number + 1) * STEP_US, "")
        for number, taken in enumerate(takes, start=1)
    ]
    rounds = Mock(last_asked_at=0.0, asked_count=0, answer=Mock(side_effect=answers))
    promoter = RedisPromoter(lambda **_: None)
    lagged: list[float] = []

    def wait(seconds: float) -> bool:
        lagged.append(round(seconds * 1e3 - STEP_US / 1e3, 3))
        if len(lagged) == len(takes):
            promoter.stop()
        return len(lagged) - 1 == woken

    promoter._promote(rounds, Mock(wait=wait))
    promoter.run()  # the promoter is stopped, so run() only closes its connections
    assert lagged == lags
