"""The package's types are of use to a program that imports it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONSUMER = Path(__file__).parents[1] / "typing" / "consumer.py"


def test_a_consumer_passes_mypy_strict(tmp_path: Path) -> None:
    """In a folder of its own, without our configuration of mypy."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(CONSUMER)]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert checked.stdout.startswith("Success"), checked.stdout + checked.stderr
