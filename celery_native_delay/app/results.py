"""Results of tasks that will not run."""

from __future__ import annotations

from typing import Any

from celery import states
from celery.backends.base import DisabledBackend

#: A result in one of these is not the last one; Celery's own revoke overwrites the same.
_UNREADY = (states.PENDING, states.RECEIVED, states.RETRY, states.REJECTED)


def tell_revoked(app: Any, task_id: str, name: str, *, reason: str) -> None:
    """Tell the result backend that task *task_id*, of that *name*, is revoked, and why.

    Chord and monitors are for the worker to tell, once. Raises whatever the backend does.
    """
    registered = app.tasks.get(name)
    backend = app.backend if registered is None else registered.backend
    if not isinstance(backend, DisabledBackend) and backend.get_state(task_id) in _UNREADY:
        backend.mark_as_revoked(task_id, reason=reason, store_result=True)
