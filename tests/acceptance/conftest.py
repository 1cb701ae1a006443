"""Fixtures: fleets of workers and producers on the brokers of tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.worker import FEW_LEVELS, Fleet, fleet_on


@pytest.fixture
def fleet(vhost_url: str, tmp_path: Path) -> Iterator[Fleet]:
    """Workers and producers on an empty virtual host, which only this test uses."""
    with fleet_on(
        vhost_url, tmp_path, native_delay_levels=FEW_LEVELS, native_delay_fused_bits=0
    ) as fleet:
        yield fleet
