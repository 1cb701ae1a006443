"""What waits in RabbitMQ, kept by RabbitMQ itself: the same promises, and those of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery

from celery_native_delay import install
from celery_native_delay.testing import PrivateRedis
from tests.integration.ledger_promises import *  # noqa: F403


@pytest.fixture
def app(vhost_url: str, ledger_redis: PrivateRedis) -> Iterator[Celery]:
    app = Celery("shop", broker=vhost_url, set_as_current=False)
    app.conf.result_backend = ledger_redis.url.replace("/0", "/1")
    yield install(app, ledger="stream")
    app.close()


@pytest.fixture
def plain_app(vhost_url: str) -> Iterator[Celery]:
    with Celery("shop", broker=vhost_url, set_as_current=False) as app:
        yield app
