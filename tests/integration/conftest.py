"""Brokers and fixtures that several modules use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_native_delay import Delay, register_transports
from example_project.private_sqs import PrivateSqs, private_sqs, require_sqs
from pytest_celery_native_delay import installed
from tests.brokers import ON_SYSTEM, in_ci, installed_rabbitmq
from tests.conformance.brokers import Broker, running_broker
from tests.integration.traffic import delaying, delays_of


@pytest.fixture(scope="session", params=[ON_SYSTEM])
def rabbitmq_version(request: pytest.FixtureRequest) -> str:
    """One RabbitMQ version, but for tests with ``on_all_versions`` or ``in_turn``."""
    return installed_rabbitmq(request.param)


@pytest.fixture(scope="module")
def shared_sqs() -> Iterator[PrivateSqs]:
    installed(require_sqs)
    with private_sqs() as sqs:
        yield sqs


@pytest.fixture
def sqs(shared_sqs: PrivateSqs, monkeypatch: pytest.MonkeyPatch) -> PrivateSqs:
    """An SQS without queues, in a process that has logged no warning yet."""
    register_transports()
    shared_sqs.wipe()
    module = "celery_native_delay.transports.sqs"
    monkeypatch.setattr(f"{module}.delays._said", set())
    monkeypatch.setattr(f"{module}.relay.LONG_POLL_SECONDS", 1)  # it outlives the relay that asked
    return shared_sqs


@pytest.fixture
def short_hops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make hops on SQS one second long, so that a test can wait for several."""
    from tests.integration.sqs_traffic import HOP_SECONDS  # imports boto3

    monkeypatch.setattr("celery_native_delay.transports.sqs.hops.HOP_SECONDS", HOP_SECONDS)


@pytest.fixture(
    scope="module", params=["filesystem", in_ci("filesystem-postgresql"), in_ci("sqla")]
)
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker whose delayed messages wait in a database."""
    with running_broker(request.param, pytest.fail) as broker:
        yield broker


@pytest.fixture
def url(broker: Broker) -> str:
    """The URL of an empty space of the broker."""
    return broker.new_space()


@pytest.fixture
def delay(app: Celery) -> Delay:
    return Delay(app)


@pytest.fixture
def connection(vhost_url: str) -> Iterator[Any]:
    """A connection to RabbitMQ whose delay levels are declared."""
    with delaying(vhost_url) as connection:
        delays_of(connection).prepare()
        yield connection
