"""Refuses calls for some seconds after a connection failed, and logs one warning."""

from __future__ import annotations

import logging
from time import monotonic

from ..backoff import Backoff
from ..errors import RecordsUnavailable
from .interface import LEFT_ALONE_SECONDS

logger = logging.getLogger(__name__)


class LinkFailures:
    """Refuses calls for some seconds after a connection failed.

    - *what*: a name for logs and errors, such as "the records at redis://127.0.0.1"
    - *left_alone_seconds*: the first and the longest pause after a failure
    - *logs*: if False, log nothing
    """

    def __init__(
        self,
        what: str,
        *,
        left_alone_seconds: tuple[float, float] = LEFT_ALONE_SECONDS,
        logs: bool = True,
    ) -> None:
        self._what = what
        self._backoff = Backoff(*left_alone_seconds)
        self._retry_at = 0.0
        self._logs = logs
        self._is_told = False
        self._reason = f"{what} are unreachable"

    def check(self) -> None:
        """Raise RecordsUnavailable during the pause after a failed connection."""
        if monotonic() < self._retry_at:
            raise RecordsUnavailable(self._reason)

    def succeeded(self) -> None:
        """Reset the backoff after a successful call; log the first success after a failure."""
        if self._is_told:
            self._is_told = False
            logger.info("native delay: %s are reachable again", self._what)
        self._backoff.reset()

    def failed(self, error: BaseException) -> RecordsUnavailable:
        """Make :meth:`check` refuse calls for some seconds; return an error that names *error*.

        Of several failures in a row, only the first is logged.
        """
        self._retry_at = monotonic() + self._backoff.failed()
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('.')}"
        if self._logs and not self._is_told:
            self._is_told = True
            logger.warning(
                "native delay: %s are unreachable: tasks are delayed as before, but cannot be "
                "listed, cancelled or moved: %s",
                self._what,
                said,
            )
        self._reason = f"{self._what} are unreachable: {said}"
        return RecordsUnavailable(self._reason)
