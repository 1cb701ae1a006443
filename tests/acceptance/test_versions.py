"""The promise holds on every supported Celery, each with its own kombu."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IN_CI = os.environ.get("CI") == "true"

#: The last releases before the one of constraints.txt, with the kombu they came with.
RELEASES = [("5.5.3", "5.5.4"), ("5.6.3", "5.6.2")]


@pytest.mark.rabbitmq310
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("celery", "kombu"), RELEASES)
def test_unit_and_task_tests_pass_on_celery(celery: str, kombu: str, tmp_path: Path) -> None:
    """A fresh environment with that release runs the unit tests and all of test_tasks."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    pins = [f"celery=={celery}", f"kombu=={kombu}", "pytest>=9", "hypothesis", "pytest-timeout"]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    installed = subprocess.run(
        [*pip, *pins, "--editable", f"{ROOT}[redis]"], capture_output=True, text=True
    )
    if installed.returncode and not IN_CI:
        pytest.skip(f"Celery {celery} cannot be installed here: {installed.stderr[-300:]}")
    assert not installed.returncode, installed.stderr

    tests = ["tests/unit", "tests/acceptance/test_tasks.py", "-m", "not rabbitmq43"]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
