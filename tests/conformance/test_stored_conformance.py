"""Promises of test_conformance for brokers that can delay, beside a store in which all tasks wait.

Brokers that cannot delay have a store there, too. A Redis broker is its own store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from celery_native_delay import DelaySettings
from tests.brokers import ON_SYSTEM, in_ci
from tests.conformance.brokers import STORES, Broker, settings_of
from tests.conformance.test_conformance import (  # noqa: F401
    test_a_delayed_message_arrives_where_and_as_an_undelayed_one,
    test_a_delayed_message_is_kept_until_its_queue_is_declared,
    test_a_plain_consumer_receives_delayed_messages,
    test_messages_arrive_when_due_and_in_that_order,
    test_messages_wait_through_a_restart,
)

BROKERS = [pytest.param(ON_SYSTEM.id, marks=pytest.mark.rabbitmq), in_ci("sqs"), in_ci("pgmq")]


@pytest.fixture
def url(broker: Broker, new_store: Callable[[str], str]) -> Iterator[str]:
    """The URL of an empty space of the broker, with an empty store beside it."""
    url = broker.new_space()
    STORES[url] = new_store(url)
    assert DelaySettings.from_mapping(settings_of(url)).is_all_in_store
    yield url
    del STORES[url]
    broker.remove_space(url)
