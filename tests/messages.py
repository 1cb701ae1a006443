"""The texts that the package logs at WARNING or above, and the problems that `delay doctor` finds.

They are read from the source. A text is a list of its fixed parts, without what is filled in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import celery_native_delay

PACKAGE = Path(celery_native_delay.__file__).parent

_LOGS = {"warning", "error", "critical", "exception", "log"}
_FINDINGS = {"Finding": 2, "of_sentence": 2, "clock_finding": 0, "_finding": 0, "parked_finding": 1}


def messages() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield where each text is made, and its fixed parts."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = _assigned(tree)
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                known = constants | _assigned(function)
                for call in ast.walk(function):
                    if isinstance(call, ast.Call) and (text := _text_of(call)) is not None:
                        where = f"{path.relative_to(PACKAGE)}:{call.lineno}"
                        for parts in _parts(text, known):
                            yield where, parts


def _text_of(call: ast.Call) -> ast.expr | None:
    match call.func:
        case ast.Attribute(ast.Name("logger"), name) if name in _LOGS:
            return call.args[1 if name == "log" else 0]
        case ast.Attribute(_, name) | ast.Name(name) if name in _FINDINGS:
            return call.args[_FINDINGS[name]]
    return None


def _assigned(tree: ast.AST) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Name(name)], value):
                found.setdefault(name, []).append(value)
    return found


def _parts(text: ast.expr, known: dict[str, list[ast.expr]]) -> Iterator[tuple[str, ...]]:
    match text:
        case ast.Constant(str() as said):
            yield tuple(filter(None, map(str.strip, re.split(r"%(?:\.\d+)?[a-z]", said))))
        case ast.JoinedStr(values):
            yield tuple(part.strip(" :") for part in _fixed(values, known) if part.strip(" :,"))
        case ast.IfExp(_, first, second):
            yield from _parts(first, known)
            yield from _parts(second, known)
        case ast.Name(name) if name in known:
            for value in known[name]:
                yield from _parts(value, known)
        case ast.BinOp(first, _, second):
            yield from _parts(first, known)
        case _:
            yield ()


def _fixed(values: list[ast.expr], known: dict[str, list[ast.expr]]) -> Iterator[str]:
    for value in values:
        match value:
            case ast.Constant(str() as said):
                yield said
            case ast.FormattedValue(ast.Name(name)):
                for each in known.get(name, []):
                    if isinstance(each, ast.Constant):
                        yield str(each.value)
