"""The gate for tasks that are to be the only ones under their key, and what follows their end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import time_ns
from typing import Any

from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import signals, states
from celery.utils.log import get_logger
from celery.worker import state as worker_state

from ..app.installation import installation_of
from ..due_time import due_us
from ..errors import InvalidDueTime
from ..keyed import rules
from ..keyed.record import HEADER, LONGEST_NAME, VERSION
from ..texts import is_text
from .arrival import Arrival, AskAgain, Ruling, WaitUntil
from .leases import Held, Leases, leases_of

logger = get_logger(__name__)

#: For so long a task waits again while its record cannot be asked for, in microseconds.
AWAY_US = 5_000_000

#: Until it is asked again of a message that cannot wait in the broker.
PAUSE_SECONDS = 1.0

#: In the header, on the way from the gate to the process that runs the task.
_TOKEN = "token"


class Unique:
    """The gate: a task whose key another one has, or that cannot be asked for, waits again."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._told = False

    def __call__(self, arrival: Arrival) -> Ruling | None:
        mark = mark_of(arrival.fields) if arrival.has_headers else None
        if mark is None or arrival.id in worker_state.revoked:
            return None
        name, leases, is_here = mark["key"], leases_of(self._app), partial(_is_here, arrival)
        if mark["until"] == "start":
            leases.hold(Held(name, arrival.id, is_here))
            return None
        try:
            token, step = leases.begin(name, arrival.id, is_here)
        except Exception as exc:
            self._tell(exc)
            return WaitUntil(arrival.now_us + AWAY_US, otherwise=AskAgain(AWAY_US / 1e6))
        self._told = False
        if step.free_us is not None:
            return WaitUntil(step.free_us, otherwise=AskAgain(PAUSE_SECONDS))
        arrival.message.headers[HEADER] = {**mark, _TOKEN: token}
        return None

    def _tell(self, exc: Exception) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "native delay: unique tasks wait until the records of their keys can be read: "
                "%s: %s",
                type(exc).__name__,
                exc,
            )


def mark_of(headers: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The mark of a unique task among its *headers*; None for any other task."""
    mark = headers.get(HEADER) if headers else None
    if not isinstance(mark, Mapping) or mark.get("v") != VERSION:
        return None
    key = mark.get("key")
    is_name = is_text(key) and len(key) <= LONGEST_NAME
    return mark if is_name and mark.get("until") in ("start", "end") else None


def _is_here(arrival: Arrival) -> bool:
    """True while its message is unacknowledged here, or its task in the pool."""
    unsettled = not arrival.message.acknowledged and arrival.is_ours
    return unsettled or arrival.id in worker_state.requests


# ---- in the process that runs the task -----------------------------------------------------------


def _marked(task: Any, request: Any) -> tuple[Leases, Mapping[str, Any]] | None:
    """The leases and the mark of a task that a worker runs; None if it has no mark."""
    mark = mark_of(vars(request))
    if mark is None or request.is_eager or installation_of(task.app) is None:
        return None
    return leases_of(task.app), mark


@signals.task_prerun.connect(weak=False)  # type: ignore[untyped-decorator]
def start(sender: Any = None, **_: Any) -> None:
    """Free the key of a task that has it until its start, or renew its lease from here, too."""
    found = _marked(sender, sender.request)
    if found is None:
        return
    (leases, mark), task_id = found, sender.request.id
    if mark["until"] == "start":
        leases.settle(mark["key"], partial(rules.release, task_id=task_id))
    elif _TOKEN in mark:
        leases.hold(Held(mark["key"], task_id, lambda: True, mark[_TOKEN], runs=True))


@signals.task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
def end(sender: Any = None, state: Any = None, retval: Any = None, **_: Any) -> None:
    """Free the key of a task that is over; one that comes again keeps it."""
    found = _marked(sender, sender.request)
    if found is None or _TOKEN not in found[1]:
        return
    (leases, mark), retry = found, None
    if state == states.RETRY:
        retry = sender.request.id, _wait_us(getattr(retval, "when", None))
    elif state == states.REJECTED and getattr(retval, "requeue", False):
        retry = sender.request.id, 0
    token = mark[_TOKEN]
    leases.settle(mark["key"], partial(rules.end, token=token, retry=retry), token=token)


# ---- in the main process -------------------------------------------------------------------------


@signals.task_revoked.connect(weak=False)  # type: ignore[untyped-decorator]
def revoked(sender: Any = None, request: Any = None, **_: Any) -> None:
    """Free the key of a task that was cancelled, revoked or has expired."""
    found = None if request is None else _marked(sender, request)
    if found is None:
        return
    leases, mark = found
    if token := mark.get(_TOKEN):
        leases.settle(mark["key"], partial(rules.end, token=token), token=token)
    leases.settle(mark["key"], partial(rules.release, task_id=request.id))


@signals.task_failure.connect(weak=False)  # type: ignore[untyped-decorator]
def lost(sender: Any = None, task_id: Any = None, exception: Any = None, **_: Any) -> None:
    """Free the key of a task whose process was killed."""
    ended_from_outside = isinstance(exception, TimeLimitExceeded | WorkerLostError)
    if ended_from_outside and installation_of(sender.app) is not None:
        leases_of(sender.app).lost(task_id)


def _wait_us(when: Any) -> int:
    """Microseconds until a retry, by its countdown or ETA."""
    if isinstance(when, int | float):
        return max(round(when * 1_000_000), 0)
    try:
        return max(due_us(when) - time_ns() // 1000, 0) if when else 0
    except InvalidDueTime:
        return 0
