"""Lets at most so many tasks of one key run at a time, on all workers, by leases."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import signals

from ..app.installation import installation_of
from ..keyed import concurrent
from ..keyed.record import name_of
from ..rates.line import Asked
from .arrival import Arrival
from .leases import Held, Leases, leases_of
from .unique import is_here

#: The header of a running task with its leases: pairs of a key's name and a token.
HEADER = "native_delay_leases"


def begin(app: Any, arrival: Arrival, limits: list[Asked]) -> int | None:
    """Take the leases of a task. Returns None, or the time to ask again if a key has no room."""
    leases = leases_of(app)
    taken: list[list[str]] = []
    for limit in limits:
        most = limit.rate.concurrent
        if most is None:
            continue
        name = name_of("concurrent", limit.name, limit.key or "")
        rule = partial(concurrent.begin, most=most)
        here = partial(is_here, arrival)
        try:
            token, step = leases.begin(name, arrival.id, here, rule, shares=True)
        except Exception:
            _release(leases, taken)
            raise
        if step.free_us is not None:
            _release(leases, taken)
            return step.free_us
        taken.append([name, token])
    if taken:
        arrival.message.headers[HEADER] = taken
    return None


def release(app: Any, headers: Any) -> None:
    """Give back the leases of a task that does not start."""
    _release(leases_of(app), headers.pop(HEADER, ()))


def _release(leases: Leases, taken: Any, *, has_run: bool = False) -> None:
    for name, token in taken:
        leases.settle(name, partial(concurrent.end, token=token, has_run=has_run), token=token)


def _of(task: Any) -> Any:
    request = task.request
    is_ours = not request.is_eager and installation_of(task.app) is not None
    return vars(request).get(HEADER, ()) if is_ours else ()


@signals.task_prerun.connect(weak=False)  # type: ignore[untyped-decorator]
def start(sender: Any = None, **_: Any) -> None:
    """Renew the leases of a running task in its own process, in case the main process dies."""
    for name, token in _of(sender):
        held = Held(name, sender.request.id, lambda: True, token, runs=True, shares=True)
        leases_of(sender.app).hold(held)


@signals.task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
def end(sender: Any = None, **_: Any) -> None:
    """End the leases of a task that has ended."""
    if taken := _of(sender):
        _release(leases_of(sender.app), taken, has_run=True)


@signals.task_revoked.connect(weak=False)  # type: ignore[untyped-decorator]
def revoked(sender: Any = None, request: Any = None, **_: Any) -> None:
    """End the leases of a revoked or expired task."""
    if request is not None and vars(request).get(HEADER):
        leases_of(sender.app).lost(request.id)
