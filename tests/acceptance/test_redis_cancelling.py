"""Cancelling and moving tasks that wait in Redis."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_native_delay.testing import PrivateRedis
from tests.acceptance.cancelling import *  # noqa: F403
from tests.acceptance.worker import Fleet, fleet_on

pytestmark = [*pytestmark, pytest.mark.ci]  # noqa: F405  at home with RabbitMQ


@pytest.fixture
def fleet(records_redis: PrivateRedis, tmp_path: Path) -> Iterator[Fleet]:
    """Its broker is the Redis in which other tests keep records."""
    with fleet_on(records_redis.url, tmp_path, **results_in(records_redis)) as fleet:  # noqa: F405
        yield fleet
    gc.collect()  # results unsubscribe


def test_a_thousand_of_ten_thousand_are_cancelled_and_exactly_those_do_not_run(
    fleet: Fleet,
) -> None:
    cancel_a_thousand_of_ten_thousand(fleet)  # noqa: F405
