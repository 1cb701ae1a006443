"""Fixtures: fleets of workers and producers on the brokers of tests/conftest.py, and a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

from celery_native_delay.testing import PrivateRedis, private_redis, vhost_name
from tests.acceptance.flower import browser
from tests.acceptance.worker import FEW_LEVELS, Fleet, fleet_on
from tests.brokers import installed_rabbitmq
from tests.conformance.brokers import options_of, running_broker, settings_of
from tests.postgresql import private_postgresql


@pytest.fixture
def new_fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Returns a fleet on the broker of a URL, with a configuration."""
    with ExitStack() as stack:
        yield lambda url, **conf: stack.enter_context(fleet_on(url, tmp_path, **conf))


@pytest.fixture
def fleet(vhost_url: str, new_fleet: Callable[..., Fleet]) -> Fleet:
    """Workers and producers on an empty virtual host, which only this test uses."""
    return new_fleet(vhost_url, native_delay_levels=FEW_LEVELS)


@pytest.fixture
def fleet_at(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Returns a fleet at a place: "redis", "filesystem", "sqla", or RabbitMQ with a store.

    The version and the store of RabbitMQ follow dashes, as in "rabbitmq-4.3-postgresql".
    """
    with ExitStack() as stack:

        def store_at(kind: str) -> str:
            if kind == "redis":
                return str(request.getfixturevalue("store_redis").url)
            if kind == "postgresql":
                return stack.enter_context(private_postgresql()).new_database()
            return f"sqlite:///{tmp_path}/store.db"

        def fleet_at(place: str, **conf: Any) -> Fleet:
            match place.split("-"):
                case ["rabbitmq", version, store]:
                    running = request.getfixturevalue("running_rabbitmq")
                    rabbitmq = running(installed_rabbitmq(version))
                    url = rabbitmq.new_vhost()
                    stack.callback(rabbitmq.delete_vhost, vhost_name(url))
                    conf["native_delay_store"] = store_at(store)
                    conf.setdefault("native_delay_levels", FEW_LEVELS)
                case ["redis"]:
                    url = store_at("redis")
                case _:
                    url = stack.enter_context(running_broker(place, pytest.fail)).new_space()
                    conf["broker_transport_options"] = options_of(url)
                    conf |= {f"native_delay_{key}": each for key, each in settings_of(url).items()}
            return stack.enter_context(fleet_on(url, tmp_path, **conf))

        yield fleet_at


@pytest.fixture(scope="module")
def redis() -> Iterator[PrivateRedis]:
    """A Redis that the tests of one module share, and may hang."""
    with private_redis() as redis:
        yield redis


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    """A browser that the tests of one module share."""
    with browser() as chrome:
        yield chrome
