"""Check that strings can be encoded as UTF-8, as brokers and databases require."""

from __future__ import annotations

from hashlib import blake2b
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


def storable(text: str) -> str:
    """Return *text* with a mark in place of what a store cannot hold: NUL, lone surrogates."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def digest_of(name: str) -> str:
    """Return a digest of *name* of 32 characters, for an index that takes no longer names."""
    return blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()
