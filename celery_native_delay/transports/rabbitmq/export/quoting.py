"""Text between double quotes, as YAML, HCL and DOT have it."""

from __future__ import annotations


def quoted(text: str) -> str:
    """*text* in double quotes; what cannot be printed as ``\\u`` or ``\\U`` and its number."""
    return f'"{escaped(text)}"'


def escaped(text: str) -> str:
    """*text* as :func:`quoted` has it, without the quotes."""
    return "".join(map(_escaped, text))


def _escaped(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char.isprintable():
        return char
    number = ord(char)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
