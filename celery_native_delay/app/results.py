"""Results of calls under keys, and of tasks that will not run."""

from __future__ import annotations

from typing import Any

from celery import states
from celery.backends.base import DisabledBackend
from celery.result import AsyncResult, EagerResult

#: A result in one of these is not the last one; Celery's own revoke overwrites the same.
_UNREADY = (states.PENDING, states.RECEIVED, states.RETRY, states.REJECTED)


class KeyedResult(AsyncResult):  # type: ignore[misc]  # Celery has no types
    """An ``AsyncResult`` of the task that stands for a key, and what the call did.

    *created* is False if another call's task stands for the key: this call has sent nothing.
    *replaced* is the id of the waiting task that was taken out for the new one.
    """

    created: bool = True
    replaced: str | None = None

    def __init__(
        self,
        id: str,
        backend: Any = None,
        task_name: str | None = None,
        app: Any = None,
        parent: Any = None,
        created: bool = True,
        replaced: str | None = None,
    ) -> None:
        super().__init__(id, backend, task_name, app, parent)
        self.created = created
        self.replaced = replaced

    def __reduce_args__(self) -> tuple[Any, ...]:
        return (*super().__reduce_args__(), self.created, self.replaced)

    def __copy__(self) -> KeyedResult:
        return keyed_result(super().__copy__(), created=self.created, replaced=self.replaced)


class EagerKeyedResult(EagerResult, KeyedResult):  # type: ignore[misc]
    """A :class:`KeyedResult` with ``task_always_eager``: the task has run."""


def keyed_result(
    result: AsyncResult, *, created: bool = True, replaced: str | None = None
) -> KeyedResult:
    """Celery's *result*, which from now on tells what the call did, too.

    It stays the same object. A copy would cost a round trip where results are in Redis: the
    subscription of an id ends with each result object of that id that is dropped.
    """
    result.__class__ = EagerKeyedResult if isinstance(result, EagerResult) else KeyedResult
    keyed: KeyedResult = result
    keyed.created, keyed.replaced = created, replaced
    return keyed


def tell_revoked(app: Any, task_id: str, name: str, *, reason: str) -> None:
    """Tell the result backend that task *task_id*, of that *name*, is revoked, and why.

    Chord and monitors are for the worker to tell, once. Raises whatever the backend does.
    """
    registered = app.tasks.get(name)
    backend = app.backend if registered is None else registered.backend
    if not isinstance(backend, DisabledBackend) and backend.get_state(task_id) in _UNREADY:
        backend.mark_as_revoked(task_id, reason=reason, store_result=True)
