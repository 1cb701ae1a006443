"""`make bench` with small numbers: it ends and writes its tables and pictures.

Figures are not checked, but those of lost and doubled tasks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from celery_native_delay.testing import require_redis
from pytest_celery_native_delay import installed
from tests.brokers import on_one_version
from tests.processes import output_of

pytestmark = pytest.mark.tools


def bench(folder: Path, scale: float, *names: str, timeout: float) -> dict[str, Any]:
    """Run scenarios; their figures."""
    options = [f"--scale={scale}", "--out", folder, *(f"--only={name}" for name in names)]
    said = output_of(sys.executable, "-m", "benchmarks", *options, timeout=timeout)
    assert "Targets" in said
    return json.loads((folder / "results.json").read_text())["scenarios"]


@on_one_version
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("rabbitmq_version")
def test_scenarios_write_tables_and_pictures(tmp_path: Path) -> None:
    installed(require_redis)
    names = ["publish", "redis-store", "store", "transactions"]
    scenarios = bench(tmp_path, 0.02, *names, timeout=280)
    assert set(scenarios) == set(names)
    for name, scenario in scenarios.items():
        assert scenario["rows"]
        assert all(target["measured"] > 0 for target in scenario["targets"])
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "| ours, countdown=60 |" in (tmp_path / "results.md").read_text()


@on_one_version
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("rabbitmq_version")
def test_a_drill_loses_no_held_task_and_runs_none_twice(tmp_path: Path) -> None:
    """A busy machine starts late tasks together: the rate is measured on a quiet one."""
    installed(require_redis)
    targets = bench(tmp_path, 0.01, "holds", timeout=580)["holds"]["targets"]
    counts = [each for each in targets if "starts in one second" not in each["what"]]
    assert len(counts) == 4
    assert all(each["measured"] <= each["limit"] for each in counts)
