"""The examples of README and docs; a test runs each block of code by its name.

A block of Python begins with ```` ```python name=bulk ````. Equal blocks of one
name are one example. One test runs all different blocks of a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(r"^```([\w{}-]+)(?: name=([\w-]+))?[^\n]*\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Example:
    """A fenced code block of a page."""

    page: str
    line: int
    language: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def _examples() -> list[Example]:
    found = []
    for path in PAGES:
        page = path.read_text()
        for block in _BLOCK.finditer(page):
            line = page.count("\n", 0, block.start()) + 1
            language, name, text = block.groups()
            where = str(path.relative_to(ROOT))
            found.append(Example(where, line, language, name or "", text))
    return found


EXAMPLES = _examples()


def named(name: str) -> list[Example]:
    """The different examples with this name."""
    return list({each.text: each for each in reversed(EXAMPLES) if each.name == name}.values())


def shown(name: str) -> pytest.MarkDecorator:
    """Parametrize a test with the examples of a name."""
    return pytest.mark.parametrize("example", named(name), ids=str)


def only(name: str) -> Example:
    """The one example of a name."""
    (example,) = named(name)
    return example


def code_beside(name: str, call: str) -> str:
    """The comment after *call* in the example of a name: the documented output."""
    found = re.search(rf"^{re.escape(call)}  # (.+)$", only(name).text, re.M)
    assert found is not None
    return found[1]
