"""One private broker per kind, version and session; one virtual host or empty Redis per test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_native_delay.testing import (
    PrivateRabbitMQ,
    PrivateRedis,
    private_rabbitmq,
    private_redis,
    require_redis,
    vhost_name,
)
from celery_native_delay.testing.redis_installation import ServerName
from pytest_celery_native_delay import installed
from tests.brokers import installed_rabbitmq
from tests.scheduling import scope_of

# A failed assertion tells its values there as well, not in test modules alone.
pytest.register_assert_rewrite(
    "tests.acceptance", "tests.conformance", "tests.integration", "tests.processes", "tests.traffic"
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let scope_of() say which tests pytest-xdist keeps in one process.

    Not `--dist=loadgroup`, which pytest 9.2 made useless:
    https://github.com/pytest-dev/pytest-xdist/issues/1386
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ByScope(config, log)


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("3.10", marks=pytest.mark.rabbitmq310),
        pytest.param("4.3", marks=pytest.mark.rabbitmq43),
    ],
)
def rabbitmq_version(request: pytest.FixtureRequest) -> str:
    """A version that private_rabbitmq() can start; for tests that need a broker of their own."""
    return installed_rabbitmq(request.param)


@pytest.fixture(scope="session")
def rabbitmq(rabbitmq_version: str) -> Iterator[PrivateRabbitMQ]:
    """The broker that all tests of this version share; do not stop it."""
    with private_rabbitmq(version=rabbitmq_version) as broker:
        yield broker


@pytest.fixture
def vhost_url(rabbitmq: PrivateRabbitMQ) -> Iterator[str]:
    """The url of an empty virtual host that belongs to this test."""
    url = rabbitmq.new_vhost()
    yield url
    rabbitmq.delete_vhost(vhost_name(url))


@pytest.fixture
def vhost(vhost_url: str) -> str:
    """The name of this test's virtual host, as the management API wants it."""
    return vhost_name(vhost_url)


@pytest.fixture(scope="session", params=["redis", "valkey"])
def server_name(request: pytest.FixtureRequest) -> ServerName:
    """A server that private_redis() can start: the system's Redis, the Valkey of the wheel."""
    return installed(require_redis, request.param).name


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty folder whose path leaves room for a unix socket; pytest's own may be too long."""
    with tempfile.TemporaryDirectory(prefix="native-delay-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def shared_redis(server_name: ServerName) -> Iterator[PrivateRedis]:
    """The Redis or Valkey that all tests share; do not stop it."""
    with private_redis(server=server_name) as server:
        yield server


@pytest.fixture
def empty_redis(shared_redis: PrivateRedis) -> PrivateRedis:
    """The shared Redis or Valkey, emptied for this test."""
    shared_redis.client.flushall()
    return shared_redis


@pytest.fixture
def own_redis(server_name: ServerName) -> Iterator[PrivateRedis]:
    """A Redis or Valkey that this test may stop, fill or configure."""
    with private_redis(server=server_name) as server:
        yield server


@pytest.fixture(scope="session")
def ledger_server() -> Iterator[PrivateRedis]:
    """The Redis of all tests whose broker needs a ledger; do not stop it."""
    installed(require_redis, "redis")
    with private_redis(server="redis") as server:
        yield server


@pytest.fixture
def ledger_redis(ledger_server: PrivateRedis) -> PrivateRedis:
    """The same, emptied for this test."""
    ledger_server.client.flushall()
    return ledger_server
