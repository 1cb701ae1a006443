"""The rules of debounce, throttle and unique. Pure: each takes what was seen, and says a step.

Times are microseconds since the epoch, by the clock of whatever keeps the records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from .record import Record, Run

#: So long after its due time a task is believed to lie in its queue, whatever became of it.
BELIEVED_US = 86_400_000_000

#: The record of a unique task stays for so long after it was due: it may be due later by now.
KEPT_US = 30 * BELIEVED_US

#: The lease of a task that runs, and how often its worker renews it.
LEASE_US = 60_000_000
RENEWED_EVERY_SECONDS = 20.0

#: A task that finds an earlier attempt of its own under way asks again so soon: most often it is
#: a retry that was quicker than the end of that attempt.
_OWN_US = 2_000_000


@dataclass(frozen=True)
class Seen:
    """A *record* as it was read at *now_us*, and the messages of its task that still wait.

    Each with its due time, 0 if it is parked; see :class:`~..records.interface.Looked`.
    """

    now_us: int
    record: Record | None
    waiting: tuple[tuple[Any, int], ...] = ()


@dataclass(frozen=True)
class Step:
    """A decision: the record that is to be there, until *kept_us*; None removes it.

    With *due_us* the caller's message is put in, due then, and if it *replaces* them those that
    wait are taken out. Else *stands* is the task that stands for the key. *free_us* is when another
    attempt might be over that runs under it now.
    """

    record: Record | None
    kept_us: int = 0
    due_us: int | None = None
    replaces: bool = False
    stands: str | None = None
    free_us: int | None = None


Rule: TypeAlias = Callable[[Seen], Step]


def debounce(seen: Seen, new_id: str, *, quiet_us: int, longest_us: int | None = None) -> Step:
    """The last call stands, once it has been quiet for *quiet_us*; *longest_us* after the first.

    A task whose time has come is left to run, and the call after it begins anew: replaced again and
    again in its last moment, it would never run.
    """
    now_us, known = seen.now_us, seen.record
    waits = _waits(seen)
    since_us = known.since_us if known is not None and waits else now_us
    due_us = now_us + quiet_us
    if longest_us is not None:
        due_us = max(min(due_us, since_us + longest_us), now_us)
    record = Record(id=new_id, due_us=due_us, since_us=since_us)
    return Step(record, due_us + BELIEVED_US, due_us, replaces=waits)


def throttle(seen: Seen, new_id: str, *, window_us: int, trails: bool) -> Step:
    """The first call stands for *window_us*; if it *trails*, the last one of them runs at its end.

    That one begins the next window.
    """
    now_us, known, waits = seen.now_us, seen.record, _waits(seen)
    if known is not None and known.id is not None and now_us >= known.due_us and not waits:
        # It ran at the end of its window.
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
    """The task that waits, is in its queue or runs stands; if there is none, the new one does.

    That is due after *wait_us*, or at *at_us*.
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
    """A task is about to run: it has the key to itself, or learns when to ask again."""
    now_us, known = seen.now_us, seen.record or Record()
    if known.run is not None and known.run.token != token and _runs(known.run, now_us):
        free_us = known.run.lease_us
        if known.run.id == task_id:
            free_us = min(free_us, now_us + _OWN_US)
        return Step(seen.record, free_us=free_us)
    run = Run(task_id, token, now_us + LEASE_US)
    return _kept(replace(_without(known, task_id), run=run), now_us)


def receive(seen: Seen, task_id: str, *, token: str) -> Step:
    """A worker has got a task that keeps its key until it starts: a lease holds the key for it.

    Of two deliveries of one task the later one has the lease. A task that has started before, such
    as a retry, has no key any more.
    """
    now_us, known = seen.now_us, seen.record
    if known is None or task_id not in (known.id, known.run and known.run.id):
        return Step(known)
    run = Run(task_id, token, now_us + LEASE_US)
    return _kept(replace(_without(known, task_id), run=run), now_us)


def renew(seen: Seen, *, token: str) -> Step:
    """Its lease goes on, unless it has lapsed and another attempt has the key."""
    known = seen.record
    if known is None or known.run is None or known.run.token != token:
        return Step(known)
    run = replace(known.run, lease_us=seen.now_us + LEASE_US)
    return _kept(replace(known, run=run), seen.now_us)


def end(seen: Seen, *, token: str, retry: tuple[str, int] | None = None) -> Step:
    """An attempt is over: its key is free, or waits for its *retry*: its id, and after how long."""
    known = seen.record
    if known is None or known.run is None or known.run.token != token:
        return Step(known)
    left = replace(known, run=None)
    if retry is not None and left.id is None:
        left = replace(left, id=retry[0], due_us=seen.now_us + retry[1])
    return _kept(left, seen.now_us)


def release(seen: Seen, task_id: str, *, token: str | None = None) -> Step:
    """A delivery of a task will never run: its key is free, unless the task still waits.

    A worker that had begun it has its attempt's *token*.
    """
    known = seen.record
    if known is None:
        return Step(None)
    left = known if _waits(seen) else _without(known, task_id)
    if token is not None and left.run is not None and left.run.token == token:
        left = replace(left, run=None)
    return _kept(left, seen.now_us)


def runs(seen: Seen) -> bool:
    """True while a task runs under the key."""
    return seen.record is not None and _runs(seen.record.run, seen.now_us)


def carry(seen: Seen, *, task_id: str, known: Record, due_us: int) -> Step:
    """A task that waited in another place waits here, with what was *known* of its key there.

    If it is here already it stands, and so does another one that waits.
    """
    here = seen.record or Record()
    runs_here = here.run is not None and here.run.id == task_id
    if here.id == task_id or runs_here:
        return Step(seen.record, stands=task_id)
    if here.id is not None and seen.waiting:
        return Step(seen.record, stands=here.id)
    later = max(here, known, key=lambda each: each.window_us)
    record = replace(later, id=task_id, due_us=due_us, since_us=known.since_us, run=here.run)
    return Step(record, max(due_us, later.window_us) + KEPT_US, due_us)


def let_go(seen: Seen, *, task_id: str) -> Step:
    """A task that waited for its key waits in another place now, and took along what it opened."""
    known = seen.record
    if known is None or known.id != task_id:
        return Step(known)
    left = replace(_without(known, task_id), window_us=0, opener=None)
    return _kept(left, seen.now_us)


def _waits(seen: Seen) -> bool:
    """True if a message of the record's task is due later, wherever a user may have moved it."""
    return any(seen.now_us < due_us for _, due_us in seen.waiting)


def _runs(run: Run | None, now_us: int) -> bool:
    return run is not None and now_us < run.lease_us


def _without(known: Record, task_id: str) -> Record:
    return replace(known, id=None, due_us=0) if known.id == task_id else known


def _kept(record: Record, now_us: int) -> Step:
    """A step to *record*, or to none if it says nothing."""
    if record.id is None and record.run is None and record.window_us <= now_us:
        return Step(None)
    lease_us = 0 if record.run is None else record.run.lease_us
    return Step(record, max(record.due_us, lease_us, record.window_us) + KEPT_US)
