"""Names under which two mappings differ, for a sentence that must not give away their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differing(what: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Names whose values are not written alike, such as "header 'tenant'"; "" if there is none.

    *what* is the names' kind; 1, 1.0 and True are three values.
    """
    names = [
        name
        for name in {**expected, **found}
        if name not in expected or name not in found or repr(expected[name]) != repr(found[name])
    ]
    return f"{what} {', '.join(map(repr, names))}" if names else ""
