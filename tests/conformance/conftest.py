"""Every broker that conforms, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from celery_native_delay.testing import PrivateRabbitMQ
from tests.conformance.brokers import BROKERS, Broker, running_broker


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """On all brokers, or on those that the module names."""
    if "broker" in metafunc.fixturenames:
        names = getattr(metafunc.module, "BROKERS", BROKERS)
        metafunc.parametrize("broker", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def broker(
    request: pytest.FixtureRequest, running_rabbitmq: Callable[..., PrivateRabbitMQ]
) -> Iterator[Broker]:
    """The broker that all promises of one round are made to; it is restarted now and then."""
    with running_broker(request.param, running_rabbitmq) as broker:
        yield broker


@pytest.fixture
def url(broker: Broker) -> Iterator[str]:
    """An empty space of the broker, for this test alone."""
    url = broker.new_space()
    yield url
    broker.remove_space(url)
