"""Computes growing pauses between attempts to reach a server."""

from __future__ import annotations


class Backoff:
    """A pause between attempts, doubled by each failure, from *first* to *longest* seconds."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self.seconds = first
        """The next pause in seconds."""

    def failed(self) -> float:
        """Return the seconds to wait before the next attempt, and double the pause."""
        seconds = self.seconds
        self.seconds = min(seconds * 2, self._longest)
        return seconds

    def reset(self) -> bool:
        """Reset the pause. Returns True if an attempt failed since the last reset."""
        has_failed = self.seconds != self._first
        self.seconds = self._first
        return has_failed
