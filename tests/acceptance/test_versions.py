"""Unit and task tests on every supported Celery release, each with its own kombu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_celery_native_delay import IN_CI
from tests.processes import output_of

pytestmark = pytest.mark.ci

#: The last releases before the one of constraints.txt, with the kombu they came with.
RELEASES = [("5.5.3", "5.5.4"), ("5.6.3", "5.6.2")]

SHOW = "import celery, kombu; print(celery.__version__, kombu.__version__)"


@pytest.mark.rabbitmq
@pytest.mark.timeout(800)
@pytest.mark.parametrize(("celery", "kombu"), RELEASES)
def test_unit_and_task_tests_pass_on_celery(celery: str, kombu: str, tmp_path: Path) -> None:
    """The release and its dependencies come first on Python's path."""
    release = tmp_path / "release"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pins = [f"celery=={celery}", f"kombu[redis]=={kombu}"]
    installed = subprocess.run([*pip, "--target", release, *pins], capture_output=True, text=True)
    if installed.returncode and not IN_CI:
        pytest.skip(f"Celery {celery} cannot be installed here: {installed.stderr[-300:]}")
    assert not installed.returncode, installed.stderr

    env = os.environ | {"PYTHONPATH": str(release)}
    assert output_of(sys.executable, "-c", SHOW, env=env).split() == [celery, kombu]
    tests = ["tests/unit", "tests/acceptance/test_tasks.py"]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not (rabbitmq43 or redis or tools)"]
    said = output_of(sys.executable, "-m", "pytest", *options, *tests, env=env, timeout=None)
    assert " passed" in said
