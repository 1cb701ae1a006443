"""Check that strings can be encoded as UTF-8, as brokers require, and show tables as text."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, TypeGuard


def is_text(value: object) -> TypeGuard[str]:
    """Return True if *value* is a text that UTF-8 can encode."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def storable(text: str) -> str:
    """Return *text* with a mark in place of what a store cannot hold: NUL, lone surrogates."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def digest_of(name: str) -> str:
    """Return a digest of *name* of 32 characters, for an index that takes no longer names."""
    return blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def printable(value: object) -> str:
    """Convert a value to text on one line, with escaped control characters."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(value))


def table(headings: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """Return a table as text, with numbers aligned to the right."""
    texts = [["" if cell is None else printable(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for row, cells in zip((headings, *rows), texts, strict=True):
        padded = (
            text.ljust(width) if isinstance(cell, str) else text.rjust(width)
            for cell, text, width in zip(row, cells, widths, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
