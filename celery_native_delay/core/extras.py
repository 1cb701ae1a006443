"""The extras of this package, named where something that they bring is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ExtraMissing(ModuleNotFoundError):
    """A package of an extra is not installed; the text says what to install."""


@contextmanager
def brought_by(extra: str, *, whose: str) -> Iterator[None]:
    """A block of imports, made by the module *whose*, of what *extra* brings.

    Raises:
        ExtraMissing: something is not there.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        raise ExtraMissing(
            f"{whose} needs the Python package {exc.name}, which is not installed: "
            f"pip install 'celery_native_delay[{extra}]'",
            name=exc.name,
        ) from exc
