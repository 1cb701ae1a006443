"""Records that are away: left alone for a while after each failure, and told of once."""

from __future__ import annotations

import logging
from time import monotonic

from ..backoff import Backoff
from ..errors import RecordsUnavailable
from .interface import LEFT_ALONE_SECONDS

logger = logging.getLogger(__name__)


class Away:
    """The failures of one link to the records at *where*."""

    def __init__(
        self, where: str, *, left_alone_seconds: tuple[float, float] = LEFT_ALONE_SECONDS
    ) -> None:
        self._where = where
        self._backoff = Backoff(*left_alone_seconds)
        self._retry_at = 0.0
        self._is_told = False
        self._said = f"the records at {where} are out of reach"

    def check(self) -> None:
        """Raise RecordsUnavailable while the records are left alone."""
        if monotonic() < self._retry_at:
            raise RecordsUnavailable(self._said)

    def works(self) -> None:
        """Note a success; the first one after a failure is logged."""
        if self._is_told:
            self._is_told = False
            logger.info("native delay: the records at %s are back", self._where)
        self._backoff.reset()

    def failed(self, error: BaseException) -> RecordsUnavailable:
        """Note a failure; the first one is logged. Returns the error to raise."""
        self._retry_at = monotonic() + self._backoff.failed()
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('.')}"
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "native delay: the records at %s are away: tasks are delayed as ever, but cannot "
                "be listed, cancelled or moved until they are back: %s",
                self._where,
                said,
            )
        self._said = f"the records at {self._where} are out of reach: {said}"
        return RecordsUnavailable(self._said)
