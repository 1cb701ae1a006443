"""Random ids by the hundred: asking the system for each takes longer than all else about it."""

from __future__ import annotations

from secrets import token_bytes

_AT_A_TIME = 256
_VARIANTS = "89ab"


class RandomIds:
    """A source of random ids, for one thread of one process."""

    def __init__(self) -> None:
        self._left: list[str] = []

    def hex(self) -> str:
        """128 random bits as 32 digits."""
        if not self._left:
            many = token_bytes(16 * _AT_A_TIME).hex()
            self._left = [many[at : at + 32] for at in range(0, len(many), 32)]
        return self._left.pop()

    def uuid(self) -> str:
        """A UUID of version 4. https://www.rfc-editor.org/rfc/rfc9562#section-5.4"""
        bits = self.hex()
        variant = _VARIANTS[int(bits[16], 16) & 3]
        return f"{bits[:8]}-{bits[8:12]}-4{bits[13:16]}-{variant}{bits[17:20]}-{bits[20:]}"
