"""Pure functions that decide about debounce, throttle and unique calls.

All times are in microseconds since the epoch, by the clock of the Redis or database.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from .record import Record, Run

#: A task counts as waiting in its queue until a day after its due time, even if the task was lost.
BELIEVED_US = 86_400_000_000

#: The state of a unique key is stored for 30 days after the task's due time, because the user may
#: reschedule the task.
KEPT_US = 30 * BELIEVED_US

#: The length of a running task's lease, and the seconds between two renewals by its worker.
LEASE_US = 60_000_000
RENEWED_EVERY_SECONDS = 20.0

#: If an earlier attempt of the same task has the lock, the task tries again after 2 s. Usually the
#: task is a retry that arrived before the attempt ended.
_OWN_US = 2_000_000

#: Bounds of the time between two tries of the tasks that wait for a shared lock.
_SHORTEST_US = 5_000
_LONGEST_US = 5_000_000
#: Each of these tasks tries at least once in this time: running tasks may end early.
_ROUND_US = 300_000_000


@dataclass(frozen=True)
class Seen:
    """The stored state of a debounce, throttle or unique key, read at the time *now_us*.

    - *record*: the stored state, or None.
    - *waiting*: the internal id and the due time of each waiting message of the key's task. The due
      time 0 means that the task is due but its queue does not exist.
    """

    now_us: int
    record: Record | None
    waiting: tuple[tuple[Any, int], ...] = ()


@dataclass(frozen=True)
class Step:
    """A decision about a debounce, throttle or unique key, and the key's new state.

    - *record*: the new state; None removes the state.
    - *kept_us*: the time when the new state expires.
    - *due_us*: the due time of the message to publish, or None to publish no message.
    - *replaces*: True if the published message replaces the key's waiting task.
    - *stands*: the id of another task that has the key, so that no message is published; or None.
    - *free_us*: the time to try again if the key is locked, or None.
    """

    record: Record | None
    kept_us: int = 0
    due_us: int | None = None
    replaces: bool = False
    stands: str | None = None
    free_us: int | None = None


Rule: TypeAlias = Callable[[Seen], Step]


def debounce(
    seen: Seen,
    new_id: str,
    *,
    quiet_us: int,
    longest_us: int | None = None,
    most_calls: int | None = None,
    call_id: str | None = None,
) -> Step:
    """Publish a new task in place of the waiting task with the same key.

    The new task is due *quiet_us* after this call, and at most *longest_us* after the first call.
    If the task collects calls, it is due at once with *most_calls* of them. A full one that waits,
    for its retry or as it is held, is not replaced. *call_id* is then a random id of this call,
    which counts once although its publish is tried again.
    """
    now_us, known = seen.now_us, seen.record
    if known is not None and call_id is not None and known.opener == call_id:
        return Step(known, stands=known.id)
    is_full = known is not None and most_calls is not None and known.calls >= most_calls
    waits = _waits(seen) and not is_full
    since_us = known.since_us if known is not None and waits else now_us
    due_us = now_us + quiet_us
    if longest_us is not None:
        due_us = max(min(due_us, since_us + longest_us), now_us)
    record = Record(id=new_id, due_us=due_us, since_us=since_us)
    if most_calls is not None:
        calls = 1 + max(known.calls, 1) if known is not None and waits else 1
        due_us = now_us if calls >= most_calls else due_us
        record = replace(record, due_us=due_us, opener=call_id, calls=calls)
    return Step(record, due_us + BELIEVED_US, due_us, replaces=waits)


def throttle(seen: Seen, new_id: str, *, window_us: int, trails: bool) -> Step:
    """Publish the first task of each window of *window_us*, and drop later tasks.

    If *trails* is true, the last task of a window runs when the window ends.
    """
    now_us, known, waits = seen.now_us, seen.record, _waits(seen)
    if known is not None and known.id is not None and now_us >= known.due_us and not waits:
        # The task of the last call ran at the end of the window.
        known = Record(window_us=known.due_us + window_us, opener=known.id)
    if known is None or now_us >= known.window_us:
        end_us = now_us + window_us
        record = Record(window_us=end_us, opener=new_id)
        return Step(record, end_us + BELIEVED_US, now_us, replaces=waits)
    if not trails or known.opener == new_id:
        return Step(seen.record, stands=known.opener)
    end_us = known.window_us
    record = replace(known, id=new_id, due_us=end_us)
    return Step(record, end_us + window_us + BELIEVED_US, end_us, replaces=waits)


def unique(seen: Seen, new_id: str, *, wait_us: int = 0, at_us: int | None = None) -> Step:
    """Publish the task if no waiting or running task has the key.

    The task is due after *wait_us*, or at the time *at_us*.
    """
    now_us, known = seen.now_us, seen.record
    if known is not None:
        if _runs(known.run, now_us):
            assert known.run is not None
            return Step(known, stands=known.run.id)
        if known.id is not None and (seen.waiting or now_us < known.due_us + BELIEVED_US):
            return Step(known, stands=known.id)
    due_us = max(now_us + wait_us if at_us is None else at_us, now_us)
    return Step(Record(id=new_id, due_us=due_us), due_us + KEPT_US, due_us)


def begin(seen: Seen, task_id: str, *, token: str) -> Step:
    """Give a unique task the lock of its key, or return the time to try again."""
    now_us, known = seen.now_us, seen.record or Record()
    if known.run is not None and known.run.token != token and _runs(known.run, now_us):
        free_us = known.run.lease_us
        if known.run.id == task_id:
            free_us = min(free_us, now_us + _OWN_US)
        return Step(seen.record, free_us=free_us)
    run = Run(task_id, token, now_us + LEASE_US)
    return _kept(replace(_without(known, task_id), runs=(run,)), now_us)


def claim_once(seen: Seen, task_id: str, *, token: str) -> Step:
    """Give a task its claim to run; *stands* is its id if it has run already."""
    known = seen.record
    if known is not None and known.opener is not None and seen.now_us < known.window_us:
        return Step(known, stands=known.opener)
    return begin(seen, task_id, token=token)


def ran_once(seen: Seen, task_id: str, *, kept_us: int) -> Step:
    """Keep the claim of a task that has succeeded, for *kept_us* microseconds."""
    until_us = seen.now_us + kept_us
    return Step(Record(window_us=until_us, opener=task_id), until_us)


def share(seen: Seen, task_id: str, *, token: str, most: int) -> Step:
    """Give a task one of *most* locks of its key, or return the time to try again."""
    now_us, known = seen.now_us, seen.record or Record()
    runs = tuple(run for run in known.runs if _runs(run, now_us))
    if len(runs) < most:
        run = Run(task_id, token, now_us + LEASE_US, now_us)
        return _kept(replace(known, runs=(*runs, run)), now_us)
    # Running tasks have done half their work on average: two others try until one of them ends.
    age_us = now_us - sum(run.since_us for run in runs) // most
    apart_us = min(max(age_us // most, _SHORTEST_US), _LONGEST_US)
    last_us = known.due_us if now_us < known.due_us < now_us + _ROUND_US else now_us
    free_us = last_us + apart_us
    return replace(_kept(replace(known, runs=runs, due_us=free_us), now_us), free_us=free_us)


def receive(seen: Seen, task_id: str, *, token: str) -> Step:
    """Lock the key of a received task with ``until="start"``; the start of the task unlocks it.

    If the task no longer has the key, the state does not change.
    """
    now_us, known = seen.now_us, seen.record
    if known is None or task_id not in (known.id, known.run and known.run.id):
        return Step(known)
    run = Run(task_id, token, now_us + LEASE_US)
    return _kept(replace(_without(known, task_id), runs=(run,)), now_us)


def renew(seen: Seen, *, token: str) -> Step:
    """Extend the lock of a key, if the execution with the id *token* holds this lock."""
    known = seen.record
    if known is None or not (mine := known.run_of(token)):
        return Step(known)
    mine = replace(mine, lease_us=seen.now_us + LEASE_US)
    return _kept(replace(known, runs=(*_others(known, token), mine)), seen.now_us)


def end(seen: Seen, *, token: str, retry: tuple[str, int] | None = None) -> Step:
    """Unlock the key of a task that has ended.

    *retry* is None, or the id and the delay (in microseconds) of a retried unique task, which keeps
    the key.
    """
    known = seen.record
    if known is None or not (mine := known.run_of(token)):
        return Step(known)
    left = replace(known, runs=_others(known, token))
    if retry is not None and left.id is None and not mine.since_us:
        left = replace(left, id=retry[0], due_us=seen.now_us + retry[1])
    return _kept(left, seen.now_us)


def release(seen: Seen, task_id: str, *, token: str | None = None) -> Step:
    """Free the key of a task that will never run, and the lock of its execution *token*, if any."""
    known = seen.record
    if known is None:
        return Step(None)
    left = known if _waits(seen) else _without(known, task_id)
    return _kept(replace(left, runs=_others(left, token)), seen.now_us)


def is_far(due_us: int, now_us: int) -> bool:
    """Return True if a key may be forgotten before its task, which waits again, is due."""
    return due_us - now_us >= BELIEVED_US // 2


def keep(seen: Seen, task_id: str | None, *, due_us: int) -> Step:
    """Keep the key of a task that a worker lets wait until *due_us*, for example as it is held."""
    known = seen.record
    if known is None or known.id != task_id or not seen.waiting:
        return Step(known)
    due_us = min(due_us, seen.now_us + KEPT_US)
    return Step(replace(known, due_us=due_us), due_us + BELIEVED_US)


def runs(seen: Seen) -> bool:
    return seen.record is not None and _runs(seen.record.run, seen.now_us)


def carry(seen: Seen, *, task_id: str, known: Record, due_us: int) -> Step:
    """Store the key of a task that moves here; *known* is the key's state at the old broker."""
    here = seen.record or Record()
    runs_here = here.run is not None and here.run.id == task_id
    if here.id == task_id or runs_here:
        return Step(seen.record, stands=task_id)
    if here.id is not None and seen.waiting:
        return Step(seen.record, stands=here.id)
    later = max(here, known, key=lambda each: each.window_us)
    record = replace(later, id=task_id, due_us=due_us, since_us=known.since_us, runs=here.runs)
    record = replace(record, calls=known.calls)
    return Step(record, max(due_us, later.window_us) + KEPT_US, due_us)


def let_go(seen: Seen, *, task_id: str) -> Step:
    """Free the key of a task that was moved to another broker."""
    known = seen.record
    if known is None or known.id != task_id:
        return Step(known)
    left = replace(_without(known, task_id), window_us=0, opener=None)
    return _kept(left, seen.now_us)


def _waits(seen: Seen) -> bool:
    """Return True if a message of the key's task waits and is not due."""
    return any(seen.now_us < due_us for _, due_us in seen.waiting)


def _others(known: Record, token: str | None) -> tuple[Run, ...]:
    return tuple(run for run in known.runs if run.token != token)


def _runs(run: Run | None, now_us: int) -> bool:
    return run is not None and now_us < run.lease_us


def _without(known: Record, task_id: str) -> Record:
    return replace(known, id=None, due_us=0) if known.id == task_id else known


def _kept(record: Record, now_us: int) -> Step:
    until_us = max(record.due_us, record.window_us, *(run.lease_us for run in record.runs), 0)
    if record.id is None and not record.runs and until_us <= now_us:
        return Step(None)
    return Step(record, until_us + KEPT_US)
