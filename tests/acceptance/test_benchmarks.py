"""`make bench` with small numbers: it ends and writes its tables and pictures.

Figures are not checked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from celery_native_delay.testing import require_redis
from pytest_celery_native_delay import installed
from tests.acceptance.worker import REPOSITORY
from tests.brokers import on_one_version

pytestmark = pytest.mark.tools


@on_one_version
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("rabbitmq_version")
def test_scenarios_write_tables_and_pictures(tmp_path: Path) -> None:
    installed(require_redis)
    names = ["publish", "redis-store", "store", "transactions"]
    options = [f"--only={name}" for name in names]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", *options, "--scale=0.02", "--out", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    written = json.loads((tmp_path / "results.json").read_text())
    assert set(written["scenarios"]) == set(names)
    for name, scenario in written["scenarios"].items():
        assert scenario["rows"]
        assert all(target["measured"] > 0 for target in scenario["targets"])
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "results.md").read_text()
    assert "| ours, countdown=60 |" in table
    assert "Targets" in run.stdout


@on_one_version
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("rabbitmq_version")
def test_a_drill_loses_no_held_task_and_runs_none_twice(tmp_path: Path) -> None:
    """A busy machine starts late tasks together: the rate is measured on a quiet one."""
    installed(require_redis)
    command = [sys.executable, "-m", "benchmarks", "--only=holds", "--scale=0.01"]
    subprocess.run([*command, "--out", str(tmp_path)], cwd=REPOSITORY, check=True, timeout=580)
    drill = json.loads((tmp_path / "results.json").read_text())["scenarios"]["holds"]
    counts = [each for each in drill["targets"] if "starts in one second" not in each["what"]]
    assert len(counts) == 4
    assert all(each["measured"] <= each["limit"] for each in counts)
