"""The public names with their signatures, frozen in golden files.

``python -m tests.unit.test_public_api`` writes the golden files; the difference is what users will
have to know of, and belongs in the changelog.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest

from scripts.reference_pages import REFERENCE, WRITTEN

GOLDEN = Path(__file__).parent / "golden"

PUBLIC = ("", "bulk", "clock", "flower", "metrics", "spark", "testing")
"""The modules whose ``__all__`` users import from."""


@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_names_and_their_signatures(name: str) -> None:
    if name == "spark":
        pytest.importorskip("pyspark")
    assert "\n".join(described(name)) + "\n" == golden(name).read_text()


@pytest.mark.parametrize("name", WRITTEN)
def test_the_reference_has_the_docstrings_of_the_code(name: str) -> None:
    """`python -m scripts.reference_pages` writes them."""
    pytest.importorskip("pyspark")
    page = (REFERENCE / name).read_text()
    assert page == WRITTEN[name](page)


def golden(name: str) -> Path:
    return GOLDEN / f"api{name and '_' + name}.txt"


def described(name: str) -> Iterator[str]:
    module = import_module(f"celery_native_delay{name and '.' + name}")
    for public in sorted(module.__all__):
        value = getattr(module, public)
        if inspect.isclass(value):
            yield from described_class(public, value, module.__all__)
        elif callable(value):
            yield f"{public}{signature(value)}"
        else:
            yield f"{public}: {type(value).__name__}"


def described_class(public: str, kind: type, names: Sequence[str]) -> Iterator[str]:
    """The members of a public class, with those of its private bases."""
    private = [base for base in kind.__mro__[1:] if is_private(base, names)]
    bases = ", ".join(
        base.__name__ for base in kind.__bases__ if base is not object and base not in private
    )
    yield f"class {public}({bases})" if bases else f"class {public}"
    if issubclass(kind, Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in kind)
        return
    if is_dataclass(kind):
        yield from (f"    {field_text(field)}" for field in fields(kind) if public_name(field.name))
    elif "__init__" in vars(kind):
        yield f"    __init__{signature(vars(kind)['__init__'])}"
    members = {name: value for each in (*private, kind) for name, value in vars(each).items()}
    for name, value in sorted(members.items()):
        if not public_name(name) or (is_dataclass(kind) and name in kind.__dataclass_fields__):
            continue
        if isinstance(value, property):
            returns = inspect.signature(cast(Any, value.fget)).return_annotation
            yield f"    {name} -> {returns}"
        elif isinstance(value, classmethod | staticmethod):
            yield f"    {type(value).__name__} {name}{signature(value.__func__)}"
        elif callable(value):
            yield f"    {name}{signature(value)}"


def is_private(base: type, names: Sequence[str]) -> bool:
    rooms = ("celery_native_delay.app.keyed", "celery_native_delay.testing.processes")
    return base.__module__ in rooms and base.__name__ not in names


def field_text(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f"{field.name}: {field.type} = {field.default!r}"
    if field.default_factory is not MISSING:
        return f"{field.name}: {field.type} = {field.default_factory.__name__}()"
    return f"{field.name}: {field.type}"


def public_name(name: str) -> bool:
    return not name.startswith("_")


def signature(function: Any) -> str:
    """The signature as it stands in the source, the same in every Python version."""
    found = inspect.signature(function)
    parameters = [
        parameter.replace(
            annotation=unquoted(parameter.annotation), default=plain(parameter.default)
        )
        for parameter in found.parameters.values()
    ]
    returns = unquoted(found.return_annotation)
    return str(found.replace(parameters=parameters, return_annotation=returns))


class Unquoted(str):
    """A text that is its own repr."""

    __slots__ = ()
    __repr__ = str.__str__


def unquoted(annotation: Any) -> Any:
    return Unquoted(annotation.strip('"')) if isinstance(annotation, str) else annotation


def plain(default: Any) -> Any:
    """*default*, or an ellipsis if its repr has an address."""
    return Unquoted("...") if " object at 0x" in repr(default) else default


if __name__ == "__main__":
    for name in PUBLIC:
        golden(name).write_text("\n".join(described(name)) + "\n")
