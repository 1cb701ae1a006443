"""Texts that can be encoded, as every broker and store needs them."""

from __future__ import annotations

from typing import TypeGuard


def is_text(value: object) -> TypeGuard[str]:
    """True for a text without lone surrogates, which UTF-8 has no bytes for."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
