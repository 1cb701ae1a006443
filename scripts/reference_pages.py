"""Write the docstrings into the reference's Markdown: `python -m scripts.reference_pages`.

Each heading of `settings.md` and `errors.md` gets its docstring. `api.md` lists what
`api-details.rst` names, with the first sentence of each docstring.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import celery_native_delay

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs/reference"
PREFIX = "native_delay_"

API_HEAD = """\
# API

The public Python names, with the first sentence of what `help()` tells of each. [All
arguments](api-details.rst) are on the site; [errors](errors.md) have their own page. All other
names of this package may change without notice.
"""

#: A longer signature is left out for a class: such objects are answers, not built by users.
LONGEST_OF_CLASS = 90


def settings(page: str) -> str:
    """Return *page* with each setting's docstring under its heading."""
    return _filled(page, rf"{PREFIX}(\w+)", _of_settings())


def errors(page: str) -> str:
    """Return *page* with each error's docstring and other base classes under its heading."""
    told = {}
    for name in re.findall(r"^## `(\w+)`$", page, re.M):
        kind = getattr(celery_native_delay, name)
        bases = [base.__name__ for base in kind.__bases__ if base not in _OF_ALL]
        text = inspect.getdoc(kind) or ""
        told[name] = _markdown(f"{text}\n\nSubclass of ``{bases[0]}``." if bases else text)
    return _filled(page, r"(\w+)", told)


def api(_: str) -> str:
    """Return the page that lists the names of `api-details.rst`."""
    return "\n".join([API_HEAD, *_api_lines((REFERENCE / "api-details.rst").read_text())])


_OF_ALL = (object, Exception, celery_native_delay.NativeDelayError)

WRITTEN = {"settings.md": settings, "errors.md": errors, "api.md": api}


def _of_settings() -> dict[str, str]:
    tree = ast.parse((ROOT / "celery_native_delay/settings.py").read_text())
    (kind,) = (node for node in tree.body if getattr(node, "name", "") == "DelaySettings")
    found = {}
    body = kind.body  # type: ignore[attr-defined]
    for field, told in pairwise(body):
        match field, told:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str() as text)):
                found[name] = _markdown(re.sub(r"\s*\n\s*", "\n", text))
    return found


def _filled(page: str, name: str, told: dict[str, str]) -> str:
    def section(heading: re.Match[str]) -> str:
        return f"{heading[1]}\n\n{told[heading[2]]}\n\n"

    body = r"(?:(?!#|<!|\| ).+\n|\n(?!#|<!|\| |\Z))*\n*"
    return re.sub(rf"^(##+ `{name}`)\n\n{body}", section, page, flags=re.M).rstrip("\n") + "\n"


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`<]+)`", r"``\1``", text)
    return text.replace("``", "`").strip()


def _api_lines(page: str) -> Iterator[str]:
    _, _, page = page.partition("\n\n")
    for block in re.split(r"\n(?=[A-Z][\w ]+\n-{3,}\n)", page)[1:]:
        title, _, *rest = block.splitlines()
        text = "\n".join(rest)
        yield f"## {title}\n"
        for name, told in re.findall(r"^The page :doc:`(/\S+)` explains (.+)$", text, re.M):
            yield f"[Guide](..{name}.md): {_markdown(told)}\n"
        yield "| name | what it does, or is |\n| --- | --- |"
        for path, options in re.findall(
            r"^\.\. auto\w+:: (\S+)\n((?: {3}:.*\n)*)", text + "\n", re.M
        ):
            yield from _rows(path, options)
        yield ""


def _rows(path: str, options: str) -> Iterator[str]:
    module, _, name = path.rpartition(".")
    value = getattr(import_module(module), name)
    yield _row(_called(name, value), value)
    members = re.search(r":members:(.*)", options)
    if members is None:
        return
    bases = value.__mro__ if "inherited" in options else (value,)
    for base in bases:
        for member, told in vars(base).items():
            named = not members[1].strip() or member in members[1].replace(",", " ").split()
            if (
                named
                and next(each for each in bases if member in vars(each)) is base
                and not member.startswith("_")
                and inspect.getdoc(told)
                and not _is_plain(told)
            ):
                yield _row(f"{name}.{_called(member, told)}", told)


def _is_plain(member: Any) -> bool:
    return not (callable(member) or isinstance(member, property | classmethod | staticmethod))


def _called(name: str, value: Any) -> str:
    """The name, with its arguments if somebody calls it."""
    function = getattr(value, "__func__", value)
    if isinstance(value, property) or (inspect.isclass(value) and "__init__" not in vars(value)):
        return name
    bare = [
        each.replace(annotation=each.empty, default=_shown(each.default))
        for each in inspect.signature(function).parameters.values()
        if each.name not in ("self", "cls")
    ]
    called = f"{name}{inspect.Signature(bare)}"
    return name if inspect.isclass(value) and len(called) > LONGEST_OF_CLASS else called


class _Default:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _shown(default: Any) -> Any:
    plain = isinstance(default, bool | int | float | str | tuple | None)
    return default if plain or default is inspect.Parameter.empty else _Default("…")


def _row(called: str, value: Any) -> str:
    first = " ".join(_markdown(inspect.getdoc(value) or "").split("\n\n")[0].split())
    return f"| `{called}` | {first.replace('|', '&#124;')} |"


if __name__ == "__main__":
    for name, write in WRITTEN.items():
        path = REFERENCE / name
        path.write_text(write(path.read_text() if path.exists() else ""))
