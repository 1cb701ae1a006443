"""redis-py connects to what kombu's URLs of Redis mean."""

from __future__ import annotations

import pytest
from redis import ConnectionPool

from celery_native_delay.urls import redis_py_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis+socket:///run/r.sock", {"path": "/run/r.sock"}),
        ("redis+socket:///run/r.sock?virtual_host=3", {"path": "/run/r.sock", "db": 3}),
        (
            "redis+socket://:secret@/run/r.sock?virtual_host=3",
            {"path": "/run/r.sock", "db": 3, "password": "secret"},
        ),
        ("redis://:secret@host:6380/2", {"host": "host", "port": 6380, "db": 2}),
    ],
)
def test_a_url_leads_where_kombu_says(url: str, expected: dict[str, object]) -> None:
    options = ConnectionPool.from_url(redis_py_url(url)).connection_kwargs
    assert expected.items() <= options.items()
