"""Lets unique and concurrent tasks wait while their key is locked, and frees keys of ended tasks.

A debounced or throttled task frees its key only if the task will never run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import signals, states
from celery.worker import state as worker_state

from ..app.installation import installation_of
from ..due_time import due_us_or_none
from ..keyed import rules
from ..keyed.record import HEADER, LOCKS, Mark, name_of
from ..now import time_ns
from ..rates.line import Asked
from ..texts import is_text
from .arrival import Arrival, AskAgain, Ruling, WaitUntil
from .in_time import StoreGate
from .leases import Held, Leases, leases_of

#: Seconds until a message is checked again that cannot wait in the broker.
PAUSE_SECONDS = 1.0


class Unique(StoreGate):
    """A check before a task runs: a unique task waits while another task has the key."""

    waits = "unique tasks wait: the store of their keys cannot be read"

    def __init__(self, app: Any) -> None:
        self._app = app

    def __call__(self, arrival: Arrival) -> Ruling | None:
        mark = _unique_mark_of(arrival.fields) if arrival.has_headers else None
        if mark is None or arrival.id in worker_state.revoked:
            return None
        rule = rules.receive if mark.until == "start" else rules.begin
        here, leases = partial(is_here, arrival), leases_of(self._app)
        try:
            token, step = leases.begin_in_time(mark.name, arrival.id, here, rule)
        except Exception as exc:
            return self.unanswered(arrival, exc)
        self.answered()
        if step.free_us is not None:
            return WaitUntil(step.free_us, otherwise=AskAgain(PAUSE_SECONDS))
        arrival.message.headers[HEADER] = replace(mark, token=token).header()
        return None


def _unique_mark_of(headers: Any) -> Mark | None:
    mark = Mark.of(headers)
    is_unique = mark is not None and mark.kind == "unique" and mark.until in ("start", "end")
    return mark if is_unique else None


def is_here(arrival: Arrival) -> bool:
    """Return True while this worker holds the unacknowledged message, or runs the task."""
    unsettled = not arrival.message.acknowledged and arrival.is_connected
    return unsettled or arrival.id in worker_state.requests


# ---- limits of concurrent tasks ------------------------------------------------------------------


def take_locks(arrival: Arrival, limits: Sequence[Asked]) -> int | None:
    """Take a lock of each limit with ``concurrent``; return None after success.

    Otherwise free the taken locks, and return the time to try again (µs since the epoch).
    """
    headers = arrival.message.headers
    headers.pop(LOCKS, None)  # of an earlier execution
    for limit in limits:
        if (most := limit.rate.concurrent) is None:
            continue
        name = name_of("concurrent", limit.name, limit.key or "")
        rule = partial(rules.share, most=most)
        leases = leases_of(arrival.consumer.app)
        here = partial(is_here, arrival)
        token, step = leases.begin_in_time(name, arrival.id, here, rule)
        if step.free_us is not None:
            give_back(arrival.consumer, headers)
            return step.free_us
        headers.setdefault(LOCKS, []).append([name, token])
    return None


def give_back(sender: Any, headers: Any, *, ended: bool = False) -> None:
    """Free the locks of :func:`take_locks`, because a task does not start or has *ended*."""
    with suppress(TypeError, ValueError):  # a malformed header has no locks
        for name, token in headers.pop(LOCKS, ()):
            if is_text(name) and is_text(token):
                leases = leases_of(sender.app)
                settle = leases.settle if ended else leases.settle_in_time
                settle(name, partial(rules.end, token=token), token=token)


# ---- in the process that runs the task -----------------------------------------------------------


def _marked(task: Any, request: Any) -> tuple[Leases, Mark] | None:
    """Return the app's leases and the task's key header, or None if the task needs no lock."""
    mark = _unique_mark_of(vars(request))
    if mark is None or request.is_eager or installation_of(task.app) is None:
        return None
    return leases_of(task.app), mark


@signals.task_prerun.connect(weak=False)  # type: ignore[untyped-decorator]
def start(sender: Any = None, **_: Any) -> None:
    """Free the key of a starting task with ``until="start"``; renew the task's other locks."""
    for name, token in vars(sender.request).get(LOCKS, ()):
        leases_of(sender.app).hold(Held(name, sender.request.id, lambda: True, token, runs=True))
    found = _marked(sender, sender.request)
    if found is None or (token := found[1].token) is None:
        return
    leases, mark = found
    if mark.until == "start":
        leases.settle(mark.name, partial(rules.end, token=token), token=token)
    else:
        leases.hold(Held(mark.name, sender.request.id, lambda: True, token, runs=True))


@signals.task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
def end(sender: Any = None, state: Any = None, retval: Any = None, **_: Any) -> None:
    """Free the keys of a task that has ended. A retried unique task keeps its key."""
    give_back(sender, vars(sender.request), ended=True)
    found = _marked(sender, sender.request)
    if found is None or found[1].until == "start" or (token := found[1].token) is None:
        return
    (leases, mark), retry = found, None
    if state == states.RETRY:
        retry = sender.request.id, _wait_us(getattr(retval, "when", None))
    elif state == states.REJECTED and getattr(retval, "requeue", False):
        retry = sender.request.id, 0
    leases.settle(mark.name, partial(rules.end, token=token, retry=retry), token=token)


# ---- in the main process -------------------------------------------------------------------------


def never_runs(sender: Any, headers: Any, task_id: str) -> None:
    """Free the keys of a task that will never run."""
    give_back(sender, headers)
    mark = Mark.of(headers)
    if mark is not None and installation_of(sender.app) is not None:
        rule = partial(rules.release, task_id=task_id, token=mark.token)
        leases_of(sender.app).settle_in_time(mark.name, rule, token=mark.token)


@signals.task_revoked.connect(weak=False)  # type: ignore[untyped-decorator]
def revoked(sender: Any = None, request: Any = None, terminated: bool = False, **_: Any) -> None:
    """Free the debounce, throttle or unique key of a revoked, cancelled or expired task.

    The only exception: a terminated task with a debounce or throttle key keeps the key, because the
    task had started.
    """
    if request is not None:
        give_back(sender, vars(request))
        if not terminated or _unique_mark_of(vars(request)) is not None:
            never_runs(sender, vars(request), request.id)


@signals.task_unknown.connect(weak=False)  # type: ignore[untyped-decorator]
@signals.task_rejected.connect(weak=False)  # type: ignore[untyped-decorator]
def discarded(sender: Any = None, message: Any = None, **_: Any) -> None:
    """Free the debounce, throttle or unique key of a message that Celery discards."""
    headers = message.headers
    if isinstance(headers, Mapping):
        never_runs(sender, headers, headers.get("id") or "")


@signals.task_failure.connect(weak=False)  # type: ignore[untyped-decorator]
def lost(sender: Any = None, task_id: Any = None, exception: Any = None, **_: Any) -> None:
    """Free the locks of a task whose process was killed."""
    if _is_from_outside(exception) and installation_of(sender.app) is not None:
        leases_of(sender.app).lost(task_id)


@signals.task_retry.connect(weak=False)  # type: ignore[untyped-decorator]
def retried(sender: Any = None, request: Any = None, reason: Any = None, **_: Any) -> None:
    """If the process of a unique task was killed, reserve the task's key until the retry."""
    if _is_from_outside(reason.exc) and installation_of(sender.app) is not None:
        leases_of(sender.app).lost(request.id, retry_us=_wait_us(reason.when))


def rejected(app: Any, task_id: str, *, requeue: bool) -> None:
    """Free the keys of a rejected message's task. A requeued unique task keeps its key."""
    leases_of(app).lost(task_id, retry_us=0 if requeue else None)


def _is_from_outside(exception: Any) -> bool:
    return isinstance(exception, TimeLimitExceeded | WorkerLostError)


def _wait_us(when: Any) -> int:
    if isinstance(when, int | float):
        return max(round(when * 1_000_000), 0)
    now_us = time_ns() // 1000
    return max((due_us_or_none(when) or now_us) - now_us, 0)
