"""Cancelling and moving tasks that wait in RabbitMQ, with the ledger in its streams."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_native_delay.testing import PrivateRedis
from celery_native_delay.transports.rabbitmq.streams.ledger import MARGIN_SECONDS
from tests.acceptance.cancelling import *  # noqa: F403
from tests.acceptance.worker import Fleet, fleet_on


@pytest.fixture
def margin_seconds() -> float:
    return MARGIN_SECONDS


@pytest.fixture
def fleet(vhost_url: str, ledger_redis: PrivateRedis, tmp_path: Path) -> Iterator[Fleet]:
    conf = {"native_delay_ledger": "stream"} | results_in(ledger_redis)  # noqa: F405
    with fleet_on(vhost_url, tmp_path, **conf) as fleet:
        yield fleet
    gc.collect()  # results unsubscribe
