"""Links that fail: each is left alone for a while, and one warning tells of it."""

from __future__ import annotations

import logging
from time import monotonic

from ..backoff import Backoff
from ..errors import RecordsUnavailable
from .interface import LEFT_ALONE_SECONDS

logger = logging.getLogger(__name__)


class Away:
    """The failures of one link to *what*, such as "the records at redis://…"."""

    def __init__(
        self,
        what: str,
        *,
        left_alone_seconds: tuple[float, float] = LEFT_ALONE_SECONDS,
        logs: bool = True,
    ) -> None:
        """Unless it *logs*, its user tells of failures."""
        self._what = what
        self._backoff = Backoff(*left_alone_seconds)
        self._retry_at = 0.0
        self._logs = logs
        self._is_told = False
        self._said = f"{what} are out of reach"

    def check(self) -> None:
        """Raise RecordsUnavailable while they are left alone."""
        if monotonic() < self._retry_at:
            raise RecordsUnavailable(self._said)

    def works(self) -> None:
        """Note a success; the first one after a failure is logged."""
        if self._is_told:
            self._is_told = False
            logger.info("native delay: %s are back", self._what)
        self._backoff.reset()

    def failed(self, error: BaseException) -> RecordsUnavailable:
        """Note a failure; the first one is logged. Returns the error to raise."""
        self._retry_at = monotonic() + self._backoff.failed()
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('.')}"
        if self._logs and not self._is_told:
            self._is_told = True
            logger.warning(
                "native delay: %s are away: tasks are delayed as ever, but cannot be listed, "
                "cancelled or moved until they are back: %s",
                self._what,
                said,
            )
        self._said = f"{self._what} are out of reach: {said}"
        return RecordsUnavailable(self._said)
