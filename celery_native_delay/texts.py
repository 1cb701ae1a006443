"""Check that strings can be encoded as UTF-8, as brokers and databases require."""

from __future__ import annotations

from typing import TypeGuard


def is_text(value: object) -> TypeGuard[str]:
    """Return True if *value* is a text that UTF-8 can encode."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
