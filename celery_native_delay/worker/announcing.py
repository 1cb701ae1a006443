"""Tasks that were cancelled while they waited, on their way through a worker.

They come marked, and Celery announces them as it does with every task that is revoked: that tells
monitors, the result backend and the chord, and acknowledges.
"""

from __future__ import annotations

from typing import Any

from celery import signals, states
from celery.app.task import Context
from celery.exceptions import TaskRevokedError
from celery.worker import state

#: By id, until they are announced: whether it was us who put them on the list of the revoked.
_arrived: dict[str, bool] = {}


def arrived(task_id: str) -> None:
    """Take note of a cancelled task that Celery has not seen yet."""
    _arrived.setdefault(task_id, False)


@signals.task_received.connect(weak=False)  # type: ignore[untyped-decorator]
def revoke(sender: Any = None, request: Any = None, **_: Any) -> None:
    """Put a noted task on the list of the revoked: Celery looks there once more before it runs.

    https://github.com/celery/celery/blob/v5.5.0/celery/worker/request.py#L711
    """
    if request.id in _arrived and request.id not in state.revoked:
        _arrived[request.id] = True
        state.revoked.add(request.id)


@signals.task_revoked.connect(weak=False)  # type: ignore[untyped-decorator]
def forget(sender: Any = None, request: Any = None, **_: Any) -> None:
    """Take a task that was announced off the list of the revoked again.

    What is chained to it, which Celery leaves pending for ever, is revoked as well, and with it a
    chord that waits for the end of the chain.
    """
    listed_by_us = None if request is None else _arrived.pop(request.id, None)
    if listed_by_us is None:
        return
    if listed_by_us:
        state.revoked.discard(request.id)
    if request.chain:
        alone = Context(vars(request))
        alone.chord = None  # it has been told
        sender.backend.mark_as_failure(
            request.id,
            TaskRevokedError("revoked"),
            request=alone,
            store_result=not request.ignore_result,
            call_errbacks=False,
            state=states.REVOKED,
        )
