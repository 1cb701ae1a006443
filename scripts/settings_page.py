"""Write the settings' docstrings into their page: `python -m scripts.settings_page`."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference/settings.md"
PREFIX = "native_delay_"


def docstrings() -> dict[str, str]:
    """The docstring of each setting, by its name."""
    tree = ast.parse((ROOT / "celery_native_delay/settings.py").read_text())
    (settings,) = (node for node in tree.body if getattr(node, "name", "") == "DelaySettings")
    found = {}
    body = settings.body  # type: ignore[attr-defined]
    for field, told in pairwise(body):
        match field, told:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str() as text)):
                found[name] = re.sub(r"\s*\n\s*", "\n", text.replace("``", "`")).strip()
    return found


def written(page: str) -> str:
    """Return *page* with each setting's docstring under its heading."""
    told = docstrings()

    def section(heading: re.Match[str]) -> str:
        return f"### `{PREFIX}{heading[1]}`\n\n{told[heading[1]]}\n\n"

    return re.sub(rf"^### `{PREFIX}(\w+)`\n\n(?:(?!#|<!).+\n)*\n*", section, page, flags=re.M)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
