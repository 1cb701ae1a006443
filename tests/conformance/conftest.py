"""Every broker that conforms, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from celery_native_delay.testing import PrivateRabbitMQ
from tests.conformance.brokers import Broker, running_broker


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("rabbitmq-3.10", marks=pytest.mark.rabbitmq310),
        pytest.param("rabbitmq-4.3", marks=pytest.mark.rabbitmq43),
        "redis",
        "valkey",
    ],
)
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
