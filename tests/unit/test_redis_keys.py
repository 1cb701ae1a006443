"""Key names, members and entries in Redis, and the URLs of a Redis."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import ConnectionPool

from celery_native_delay.transports.redis.keys import (
    Destination,
    RedisBrokerKeys,
    entry_of,
    member_of,
    opened_entry,
)
from celery_native_delay.urls import redis_py_url


def message(tag: str = "tag-1", **headers: Any) -> dict[str, Any]:
    return {"headers": headers, "properties": {"delivery_tag": tag}}


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
    assert member_of(message(id="task-1"), "celery") == "task-1:u2yCm81Mnozy"


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
