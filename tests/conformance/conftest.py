"""Run each test of the suite on each broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from celery_native_delay.testing import PrivateRabbitMQ
from tests.conformance.brokers import BROKERS, Broker, running_broker


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize *broker* with all brokers, or with the module's ``BROKERS``."""
    if "broker" in metafunc.fixturenames:
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
