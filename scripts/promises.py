"""Print what the guides promise, and the tests that hold it: `python -m scripts.promises`.

The promises are in `tests/promises.toml`; `tests/unit/test_words.py` keeps them complete.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GUARANTEES = "how-it-works/guarantees"
#: The corners of the guides of the same names.
CORNERS = ("reference/keys", "reference/rates", "reference/schedules")


def promises() -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield page, heading, promise and tests."""
    for page, sections in tomllib.loads((ROOT / "tests/promises.toml").read_text()).items():
        for heading, found in sections.items():
            if heading == "nothing":
                yield from ((page, each, "", []) for each in found)
            else:
                yield from ((page, heading, promise, tests) for promise, tests in found.items())


def headings(page: str) -> set[str]:
    """The headings below the title, or the title if there are none; and the rows of guarantees."""
    text = re.sub(r"^```.*?^```$", "", (DOCS / f"{page}.md").read_text(), flags=re.M | re.S)
    found = re.findall(r"^##+ (.+)$", text, re.M) or re.findall(r"^# (.+)$", text, re.M)
    return {*found, *re.findall(r"^\| \*\*(.+?)\*\* \|", text, re.M)}


def pages() -> list[str]:
    guides = sorted(path.relative_to(DOCS).with_suffix("") for path in DOCS.glob("guides/*.md"))
    return [GUARANTEES, *CORNERS, *map(str, guides)]


def functions_of(module: str) -> set[str]:
    """The functions of a test module such as `unit/test_words`; empty if it is gone."""
    path = ROOT / f"tests/{module}.py"
    tree = ast.parse(path.read_text() if path.exists() else "")
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


if __name__ == "__main__":
    last = ""
    for page, heading, promise, tests in promises():
        if f"{page}: {heading}" != last:
            last = f"{page}: {heading}"
            print(f"\n{last}")
        print(f"  {promise or '(promises nothing)'}", *tests, sep="\n    ")
