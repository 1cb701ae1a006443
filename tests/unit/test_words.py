"""Rules for docstrings and words that can be checked by a program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import celery_native_delay

PACKAGE = Path(celery_native_delay.__file__).parent
GLOSSARY = Path(__file__).parents[2] / "docs" / "how-it-works" / "glossary.md"

#: A docstring that begins so says nothing in a tooltip, or has no subject.
_EMPTY_BEGINNING = re.compile(
    r"(What|Whether|Which|Who|How|Where|When|Why|See|The same|Is|Are|Has|Have|Was|Does)\b"
)

#: It is a producer, a worker, a consumer or a user.
_NO_ONE = re.compile(r"\b(nobody|somebody|anybody|whoever|someone|anyone)\b", re.IGNORECASE)


def _docstrings() -> Iterator[tuple[str, str]]:
    """Place and text of each docstring, including docstrings of attributes."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for each in node.body:
                    match each:
                        case ast.Expr(ast.Constant(str() as text)):
                            yield f"{path.relative_to(PACKAGE)}:{each.lineno}", text.strip()


def test_a_docstring_names_its_subject_first() -> None:
    found = [(where, text.splitlines()[0]) for where, text in _docstrings() if text]
    assert len(found) > 1000
    assert [each for each in found if _EMPTY_BEGINNING.match(each[1])] == []


def test_the_package_uses_no_word_like_nobody() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if _NO_ONE.search(line)
    ]
    assert found == []


def test_the_glossary_defines_each_word_once() -> None:
    defined = re.findall(r"^(\w.*)\n    \w", GLOSSARY.read_text(), re.MULTILINE)
    assert len(defined) > 30
    assert sorted(defined) == sorted(set(defined))
