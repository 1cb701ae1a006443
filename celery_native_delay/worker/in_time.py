"""Asks the store from the consumer's thread, which must not wait for a store that hangs."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import ClassVar, TypeVar

from celery.utils.log import get_logger

from .. import now
from ..backoff import Backoff
from ..errors import StoreUnavailable, described
from ..within import Within
from .arrival import Arrival, WaitUntil

logger = get_logger(__name__)

T = TypeVar("T")

#: Seconds that a worker's consumer waits for the store. Meanwhile no other task starts.
PATIENCE_SECONDS = 0.3

#: Seconds in which the store is not asked after it has not answered: first, and at most. Else each
#: of a hundred received tasks would cost 0.3 s.
_LEFT_ALONE_SECONDS = (1.0, 5.0)

_within = Within(PATIENCE_SECONDS, name="native-delay-gates")
_backoff = Backoff(*_LEFT_ALONE_SECONDS)
_asked_again_at = 0.0


def in_time(call: Callable[[], T], *, undo: Callable[[T], object] = lambda result: None) -> T:
    """Return the result of *call*, which asks the store; raise StoreUnavailable if it hangs.

    The call goes on in its thread. *undo* frees what it takes too late.
    """
    global _asked_again_at
    if now.stopped_at_ns is not None:
        return call()  # the test clock's store is a local file, and its time must not pass
    if monotonic() < _asked_again_at:
        raise StoreUnavailable("the store did not answer the worker a moment ago")
    try:
        answer = _within(call, undo=undo)
    except TimeoutError as exc:
        _asked_again_at = monotonic() + _backoff.failed()
        raise StoreUnavailable(f"the store does not answer the worker: {exc}") from exc
    _backoff.reset()
    return answer


class StoreGate:
    """A check before a task runs that asks the store; without an answer the task waits."""

    waits: ClassVar[str]
    """The warning when the store does not answer."""

    _is_told = False

    def unanswered(
        self, arrival: Arrival, exc: Exception, *, delivery_id: str | None = None
    ) -> WaitUntil:
        """Log the first error of an outage; return the decision that the task waits.

        *delivery_id* is as in :class:`.WaitUntil`.
        """
        if not self._is_told:
            self._is_told = True
            logger.warning("native delay: %s: %s", self.waits, described(exc))
        return arrival.until_store_answers(delivery_id)

    def answered(self) -> None:
        """Note that the store answers, so that the next outage is logged again."""
        self._is_told = False
