"""The protocol by which a message is replaced on a broker that cannot be looked into.

A message that waits there cannot be taken back. So:

1. ``Index.look()`` marks the new delivery as undecided: a worker that receives it now drops it;
2. :func:`publish_undecided` publishes the new message, confirmed;
3. ``Index.compare_and_set()`` makes the new message count and the old ones void, if nothing has
   changed since. A worker that receives a void message drops it.

A process that dies in between has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import time_ns
from typing import TypeVar

from ..errors import NativeDelayError, RecordsUnavailable
from .interface import MARK_GRACE_MS, Index

T = TypeVar("T")


def publish_undecided(index: Index, delivery_id: str, due_us: int, publish: Callable[[], T]) -> T:
    """Call *publish*, which publishes the undecided delivery; if it fails, see to the mark."""
    try:
        return publish()
    except NativeDelayError:
        index.unmark(delivery_id)
        raise
    except Exception:
        # The broker may hold the message all the same.
        left_ms = max(due_us - time_ns() // 1000, 0) // 1000 + MARK_GRACE_MS
        with suppress(RecordsUnavailable):
            index.unmark(delivery_id, left_ms)
        raise
