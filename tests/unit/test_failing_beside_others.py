"""scripts/test_alone.sh: a test that fails beside others and passes alone is let through once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tools

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/test_alone.sh"
NAME = "test_it.py::test_it"

FAILS_AT_FIRST = """
from pathlib import Path

def test_it():
    ran, before = Path("ran"), Path("ran").exists()
    ran.touch()
    assert before
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose only test has just failed, and passes from now on."""
    for folder in ("scripts", "tests", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "scripts")
    python = tmp_path / ".venv/bin/python"
    plain = "PYTEST_ADDOPTS= PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"
    python.write_text(f'#!/bin/sh\n{plain} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "tests/failed_beside_others.txt").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(FAILS_AT_FIRST)
    assert subprocess.run([python, "-m", "pytest"], cwd=tmp_path, capture_output=True).returncode
    return tmp_path


def alone(project: Path, status: str) -> tuple[int, str]:
    done = subprocess.run(
        [project / "scripts/test_alone.sh", status], capture_output=True, text=True
    )
    return done.returncode, done.stdout


def test_a_test_that_passes_alone_is_let_through_and_told_at_the_end(project: Path) -> None:
    status, said = alone(project, "1")
    assert (status, said.count("1 passed")) == (0, 1)
    status, told = alone(project, "--told")
    assert (status, told.splitlines()[1:]) == (0, [NAME])


def test_a_test_that_was_let_through_before_fails(project: Path) -> None:
    (project / "tests/failed_beside_others.txt").write_text(f"{NAME}\n")
    status, said = alone(project, "1")
    assert (status, said.count(NAME), "passed" in said) == (1, 1, False)
    assert alone(project, "--told") == (0, "")


def test_other_errors_of_pytest_are_passed_on(project: Path) -> None:
    assert alone(project, "4") == (4, "")
