"""Asks the store from the consumer's thread, which must not wait for a store that hangs."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from ..backoff import Backoff
from ..errors import StoreUnavailable
from ..within import Within

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
    if monotonic() < _asked_again_at:
        raise StoreUnavailable("the store did not answer the worker a moment ago")
    try:
        answer = _within(call, undo=undo)
    except TimeoutError as exc:
        _asked_again_at = monotonic() + _backoff.failed()
        raise StoreUnavailable(f"the store does not answer the worker: {exc}") from exc
    _backoff.reset()
    return answer
