"""What waits in RabbitMQ, kept by RabbitMQ itself: the promises of every ledger."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery

from tests.integration.ledger_promises import *  # noqa: F403
from tests.integration.test_stream_ledger import app  # noqa: F401

pytestmark = [pytestmark, pytest.mark.ci]  # noqa: F405  at home with a ledger in Redis


@pytest.fixture
def plain_app(vhost_url: str) -> Iterator[Celery]:
    with Celery("shop", broker=vhost_url, set_as_current=False) as plain:
        yield plain
