"""The story of a task: where it is, why it waits, how it ended, and what to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery, states
from celery.backends.base import DisabledBackend

from ..durations import duration
from ..errors import described
from ..finding import WRONG
from ..now import utc_now
from ..rates.line import RateLine, name_of, places_in
from ..records.waiting import Waiting
from ..transports.interface import AdminPart
from ..urls import without_password
from .broker import ask_on_a_connection, shown_broker
from .installation import admin_part, installed

#: Seconds in which workers must say that they have the task, and parked tasks that are searched.
_INSPECT_SECONDS = 1.0
_PARKED = 1000

_ELSEWHERE = (
    "not found. It may be in its queue, in another broker, virtual host or namespace, never sent, "
    "or ended without a result: look at its id, at `delay status` and `delay doctor`, at the logs "
    "of producer and workers, and at Flower's page Tasks"
)


def story(
    app: Celery, task_id: str, tasks: Sequence[Waiting], *, lines: Sequence[RateLine], taken: bool
) -> list[str]:
    """Return sentences about a task, of which the messages *tasks* wait.

    *taken*: a process takes the task out of the store at this moment.
    """
    if tasks:
        return [said for task in tasks for said in _of_waiting(app, task, lines)]
    found = ["it is due, and is being published to its queue"] if taken else []
    looks: list[Callable[[Celery, str], Iterable[str]]] = [_in_workers, _result, _in_broker]
    for look in looks:
        try:
            found += look(app, task_id)
        except SoftTimeLimitExceeded:
            raise
        except Exception as exc:  # of a result backend, a broker or its driver: the others tell
            found.append(f"{look.__name__[1:].replace('_', ' ')}: cannot be read: {described(exc)}")
    return found or [_ELSEWHERE]


def _of_waiting(app: Celery, task: Waiting, lines: Sequence[RateLine]) -> Iterator[str]:
    if task.origin:
        by = f", by the task {task.parent_id}" if task.parent_id else ""
        yield f"sent by {task.origin}{by}" + f", retry {task.retries}" * bool(task.retries)
    store = installed(app).settings().store
    where = f"the broker {shown_broker(app)}" if store is None else without_password(store)
    late_seconds = (utc_now() - task.due).total_seconds()
    due = (
        f"due since {duration(late_seconds)}"
        if late_seconds > 0
        else f"due in {duration(-late_seconds)}"
    )
    to = f"the queue {task.queue}" if task.queue else f"the exchange {task.exchange}"
    held = task.held
    yield f"waits in {where} for {to}, {'held' if held else due}"
    if held:
        since = f"it was due {_at(app, held.due_us)}"
        yield f"held by {held.by} as {held.hold}, {since}: `delay release` lets it go"
    if task.refusal:
        yield f"parked, and tried again by workers: {task.refusal}"
    for line in lines:
        if name_of(line.task, line.key) in places_in(task.place):
            until = f", held until {_at(app, line.held_until_us)}" if line.held_until_us else ""
            key = "" if line.key is None else f"[{line.key}]"
            yield f"limited by {line.task}{key} {line.rate}, {line.waiting:,} wait{until}"
    if task.key:
        yield f"sent under the {task.kind} key {task.key}"
    if late_seconds > 0:
        yield from _ask(app, _problems)


def _problems(part: AdminPart) -> list[str]:
    found = [each for each in part.status().found if each.level == WRONG]
    return [f"{each.problem}: {each.remedy}" for each in found]


def _in_workers(app: Celery, task_id: str) -> Iterator[str]:
    asked = app.control.inspect(timeout=_INSPECT_SECONDS).query_task(task_id) or {}
    for worker, tasks in asked.items():
        for state, info in (tasks or {}).values():
            started = info.get("time_start")
            since = f" since {_at(app, round(started * 1_000_000))}" if started else ""
            yield f"the worker {worker} has it: {state}{since}"


def _result(app: Celery, task_id: str) -> Iterator[str]:
    if isinstance(app.backend, DisabledBackend):
        return
    meta: dict[str, Any] = app.backend.get_task_meta(task_id)
    if meta["status"] == states.PENDING:
        return
    worker = f" on {meta['worker']}" if meta.get("worker") else ""
    done = meta.get("date_done")
    at = f" at {done.isoformat() if isinstance(done, datetime) else done}" if done else ""
    result = meta.get("result")
    what = f": {result!r}" if meta["status"] in states.EXCEPTION_STATES and result else ""
    yield f"its result is {meta['status']}{worker}{at}{what}"


def _in_broker(app: Celery, task_id: str) -> list[str]:
    def looked(part: AdminPart) -> list[str]:
        _, parked = part.parked(limit=_PARKED) or (0, [])
        found = ["parked: due, but no queue takes it"] * any(each.id == task_id for each in parked)
        own = getattr(part, "own", None)  # beside a store
        if not found and own is not None and (waiting := own.backlog().waiting):
            found.append(f"it may be one of {waiting:,} that wait in the broker, which lists none")
        return found

    return _ask(app, looked)


def _ask(app: Celery, question: Callable[[AdminPart], list[str]]) -> list[str]:
    return ask_on_a_connection(app, lambda connection: question(admin_part(app, connection)))


def _at(app: Celery, us: int) -> str:
    return datetime.fromtimestamp(us / 1_000_000, app.timezone).isoformat(timespec="seconds")
