"""Fixtures: fleets of workers and producers on the brokers of tests/conftest.py, and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from celery_native_delay.testing import PrivateRedis, private_redis
from tests.acceptance.flower import browser
from tests.acceptance.worker import FEW_LEVELS, Fleet, fleet_on


@pytest.fixture
def fleet(vhost_url: str, tmp_path: Path) -> Iterator[Fleet]:
    """Workers and producers on an empty virtual host, which only this test uses."""
    with fleet_on(
        vhost_url, tmp_path, native_delay_levels=FEW_LEVELS, native_delay_fused_bits=0
    ) as fleet:
        yield fleet


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
