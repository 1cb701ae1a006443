"""Pauses between attempts at what is away. Pure."""

from __future__ import annotations


class Backoff:
    """Pauses in seconds, each twice as long as the one before, from *first* to *longest*."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self.seconds = first
        """The pause after the next failure."""

    def failed(self) -> float:
        """The pause after this failure; the one after the next is twice as long."""
        seconds = self.seconds
        self.seconds = min(seconds * 2, self._longest)
        return seconds

    def reset(self) -> bool:
        """Begin with the shortest pause again; True if there has been a failure."""
        has_failed = self.seconds != self._first
        self.seconds = self._first
        return has_failed
