"""Run each test of the suite on each broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis, private_redis, require_redis
from pytest_celery_native_delay import installed
from tests.conformance.brokers import (
    BROKERS,
    Broker,
    Pgmq,
    Redis,
    has_database_beside,
    own_store,
    running_broker,
)
from tests.postgresql import PrivatePostgreSQL, find_postgresql, private_postgresql


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize *broker* with the module's ``BROKERS``, unless the test does; else with all."""
    chosen = {mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")}
    if "broker" in metafunc.fixturenames and "broker" not in chosen:
        names = getattr(metafunc.module, "BROKERS", BROKERS)
        metafunc.parametrize("broker", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def broker(
    request: pytest.FixtureRequest, running_rabbitmq: Callable[..., PrivateRabbitMQ]
) -> Iterator[Broker]:
    """A running broker, shared by all tests on it; some tests restart it."""
    with running_broker(request.param, running_rabbitmq) as broker:
        yield broker


@pytest.fixture
def url(broker: Broker) -> Iterator[str]:
    """The URL of an empty space of the broker, for one test."""
    url = broker.new_space()
    yield url
    broker.remove_space(url)


@pytest.fixture(scope="session")
def store_server() -> Iterator[PrivateRedis]:
    """The Redis in which the stores beside brokers have a database each."""
    installed(require_redis, "redis")
    with private_redis(server="redis", config=Redis.CONFIG) as server:
        yield server


@pytest.fixture(scope="session")
def store_postgresql() -> Iterator[PrivatePostgreSQL]:
    """The PostgreSQL in which the stores beside brokers have a database each."""
    installed(find_postgresql)
    with private_postgresql() as server:
        yield server


@pytest.fixture(scope="session")
def new_store(broker: Broker, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Returns the URL of an empty store for a space of a broker that needs one.

    Each broker has another kind of store: not all tests run on all pairs.
    """

    def new(url: str) -> str:
        if isinstance(broker, Pgmq):
            return own_store(url)
        if has_database_beside(broker):
            server: PrivatePostgreSQL = request.getfixturevalue("store_postgresql")
            return server.new_database()
        port = request.getfixturevalue("store_server").port
        return f"redis://127.0.0.1:{port}/{next(_databases)}"

    return new


_databases = count(1)
