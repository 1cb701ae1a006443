"""What a package index gets: the source archive, the README, the address of the project."""

from __future__ import annotations

import re
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.sdist import SdistBuilder

from scripts.index_metadata import IndexMetadata

ROOT = Path(__file__).parents[2]

SOURCE = "https://code.example/shop/celery_native_delay"


def described(**project: Any) -> dict[str, Any]:
    """The metadata of a version, as `scripts/index_metadata.py` gives it to hatchling."""
    IndexMetadata(str(ROOT), {}).update(project)
    return project


def test_a_release_without_an_address_is_not_built() -> None:
    with pytest.raises(ValueError, match=r"expected \[project\.urls\] .*, got version 1\.0\.0 and"):
        described(version="1.0.0")
    assert described(version="1.0.0", urls={"Source": SOURCE})
    assert described(version="1.0.0.dev0")


def test_the_readme_on_the_index_has_no_relative_link() -> None:
    text = described(version="1.0.0.dev0")["readme"]["text"]
    assert "[quickstart]" not in text
    assert "Then read the quickstart" in text
    assert re.findall(r"\]\((?!https?:)", text) == []
    text = described(version="1.0.0", urls={"Source": SOURCE})["readme"]["text"]
    assert f"[quickstart]({SOURCE}/blob/v1.0.0/docs/start.md)" in text
    assert re.findall(r"\]\((?!https?:)", text) == []


def test_the_source_archive_has_no_pictures_and_no_tests(tmp_path: Path) -> None:
    """Golden files are some of the tests."""
    (path,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "scripts/index_metadata.py"} <= names
    assert {"celery_native_delay/py.typed", "pytest_celery_native_delay.py"} <= names
    assert [name for name in names if name.endswith(".png") or name.startswith("tests")] == []


def test_every_action_of_a_workflow_is_pinned_by_its_hash() -> None:
    """A tag can be moved to other code."""
    lines = [
        line
        for path in (ROOT / ".github/workflows").glob("*.yml")
        for line in path.read_text().splitlines()
        if "uses:" in line and "uses: ./" not in line
    ]
    assert len(lines) > 5
    assert [line for line in lines if not re.search(r"@[0-9a-f]{40} # v[\d.]+$", line)] == []


def test_every_dependency_with_private_names_that_are_used_has_a_ceiling() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(each for extra in extras.values() for each in extra)]
    extended = [each for each in needed if re.match(r"(celery|kombu|flower|pyspark)(\[|>)", each)]
    assert len(extended) >= 6
    assert [each for each in extended if not re.search(r",<\d+$", each)] == []
