"""Growing pauses between attempts to reach a server. This module does no I/O."""

from __future__ import annotations


class Backoff:
    """Pauses in seconds from *first* to *longest*, each twice as long as the pause before."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self.seconds = first
        """The pause that the next call of :meth:`failed` returns."""

    def failed(self) -> float:
        """Return the pause in seconds before the next attempt, and double the pause."""
        seconds = self.seconds
        self.seconds = min(seconds * 2, self._longest)
        return seconds

    def reset(self) -> bool:
        """Start again with the shortest pause. Returns True if there was a failure."""
        has_failed = self.seconds != self._first
        self.seconds = self._first
        return has_failed
