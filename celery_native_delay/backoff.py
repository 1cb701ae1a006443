"""Growing pauses between attempts to reach a server. Pure."""

from __future__ import annotations


class Backoff:
    """Pauses in seconds, each twice as long as the one before, from *first* to *longest*."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self.seconds = first
        """The pause that the next call of :meth:`failed` returns."""

    def failed(self) -> float:
        """The pause after this failure, in seconds; the next one is twice as long."""
        seconds = self.seconds
        self.seconds = min(seconds * 2, self._longest)
        return seconds

    def reset(self) -> bool:
        """Start again with the shortest pause; True if there was a failure."""
        has_failed = self.seconds != self._first
        self.seconds = self._first
        return has_failed
