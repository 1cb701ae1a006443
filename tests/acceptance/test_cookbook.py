"""The programs of the cookbook are short, and do what their tests say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT

COOKBOOK = ROOT / "docs/cookbook"
PROGRAMS = sorted(COOKBOOK.glob("*.py"))


def test_every_program_is_short_and_on_the_page() -> None:
    page = (COOKBOOK / "index.md").read_text()
    for program in PROGRAMS:
        text = program.read_text()
        assert len(text.splitlines()) <= 60, program
        assert "\ndef test_" in text, program
        assert page.count(f"```{{literalinclude}} {program.name}\n") == 1, program


def test_every_program_without_spark_passes_its_own_tests(tmp_path: Path) -> None:
    """They run by the clock, without a broker."""
    programs = [program for program in PROGRAMS if "(spark" not in program.read_text()]
    assert len(PROGRAMS) - len(programs) == 1
    pytest.importorskip("time_machine")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-Werror", "-p", "no:cacheprovider", *programs],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if "PYTEST" not in name}
        | {"BROKER_URL": "memory://", "DATABASE_URL": f"sqlite:///{tmp_path}/shop.db"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
