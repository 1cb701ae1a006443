"""Rules for the modules of the package, its types and ARCHITECTURE.md."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest
from celery import _state

import celery_native_delay

PACKAGE = Path(celery_native_delay.__file__).parent
ROOT = Path(__file__).parents[2]

MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_docstring(module: str) -> None:
    first_line = (PACKAGE / module).read_text().splitlines()[0]
    assert first_line.startswith(('"""', "``", "#"))


def test_the_doctests_of_the_package_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # They make an app current; the tests after this one must not meet it.
    monkeypatch.setattr(_state._tls, "current_app", None, raising=False)
    results = doctest.testmod(celery_native_delay)
    assert results.attempted >= 3
    assert results.failed == 0


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_a_consumer_passes_mypy_strict(tmp_path: Path) -> None:
    """mypy runs in another folder, without our configuration."""
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        str(ROOT / "tests/typing/consumer.py"),
    ]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert checked.stdout.startswith("Success"), checked.stdout + checked.stderr


def test_every_path_in_the_architecture_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    names = re.findall(r"`([\w/.]+(?:\.py|/))`", text)
    rooms = (ROOT, PACKAGE, PACKAGE / "transports")
    assert len(names) > 20
    assert [name for name in names if not any((room / name).exists() for room in rooms)] == []


def test_the_architecture_names_every_subpackage() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert [room for room in sorted(rooms) if f"`{room}/`" not in text] == []
