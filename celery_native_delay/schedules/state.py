"""The stored state of a schedule entry, and functions that compute a new state.

An *occurrence* is one message of a schedule entry's task, with a due time. All times are in
microseconds since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from celery.schedules import crontab

from ..records.interface import Change, Snapshot
from ..texts import is_text
from .entry import ScheduleEntry

#: The header of an occurrence: the names of app and schedule entry, and the occurrence's number.
HEADER = "native_delay_schedule"

#: The header of each task that celery beat sends, and this package for a schedule entry.
BEAT_TASK = "celery_beat_task"

VERSION = 1

#: An occurrence that is overdue by a minute and does not wait in the broker may be lost.
OVERDUE_US = 60_000_000

#: Reasons why an occurrence does not run.
MISSED = "its time was missed (native_delay_schedules_catch_up, beat_cron_starting_deadline)"
EXPIRED = "it expired before a worker ran it"

#: At most this many missed occurrences run one after the other.
MOST_MISSED = 100

#: The state of an entry is kept for ten years.
KEPT_US = 10 * 365 * 86_400_000_000

CatchUp: TypeAlias = Literal["one", "none", "all"]

#: Why Celery does not run the task of a message that it received.
Discarded: TypeAlias = Literal["cancelled", "expired"]


@dataclass(frozen=True)
class State:
    """The stored state of a schedule entry and of its waiting message.

    - *entry*: the schedule entry as JSON
    - *id*, *due_us*, *sent_us*: the waiting message's task id, due time and publish time
    - *number*: the waiting message's number, higher for each new message
    - *ran*: the task id of the last run
    - *runs*, *last_us*: the number of runs, and the time of the last run
    - *missed*: the number of late runs since the last run on time. A late run begins after the next
      due time. The number 100 becomes 0. Always 0 if ``native_delay_schedules_catch_up`` is "one"
      or "none".
    - *problem*: the reason why workers could not publish the entry's message; None if they could
    - *left_out*: the reason why the last occurrence did not run; None if it did. A cancelled
      occurrence does not count.
    - *left_outs*: the number of occurrences that did not run, up to the last one that did
    """

    entry: str
    id: str | None = None
    number: int = 0
    due_us: int | None = None
    sent_us: int = 0
    ran: str | None = None
    runs: int = 0
    last_us: int = 0
    missed: int = 0
    paused: bool = False
    problem: str | None = None
    left_out: str | None = None
    left_outs: int = 0

    def encoded(self) -> str:
        made = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(made, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str | None) -> State | None:
        """Decode the JSON of a state; unknown fields are ignored."""
        if text is None:
            return None
        made = json.loads(text)
        return cls(**{name: made[name] for name in cls.__dataclass_fields__ if name in made})

    def waits_for(self, number: int) -> bool:
        return self.number == number and self.due_us is not None


class Occurrence(NamedTuple):
    """One message of a schedule entry: the app and the entry's name, and the message's number."""

    app: str
    entry: str
    number: int


def occurrence_of(headers: Mapping[str, Any]) -> Occurrence | None:
    """Return the :class:`Occurrence` that *headers* name, or None."""
    mark = headers.get(HEADER)
    if not isinstance(mark, Mapping) or mark.get("v") != VERSION:
        return None
    app, name, number = mark.get("app"), mark.get("entry"), mark.get("number")
    if not is_text(app) or not is_text(name) or not isinstance(number, int):
        return None
    return Occurrence(str(app), str(name), number)


def planned(state: State | None, entry: ScheduleEntry, now_us: int) -> State | None:
    """Return the state for a new or changed schedule entry; None if unchanged.

    If only the task or the arguments changed, the due time stays. A new due time would postpone a
    weekly task at each release.
    """
    if state is not None and state.entry == entry.text:
        return None
    before = state or State("")
    due_us = None if before.paused else _first_us(entry, before, now_us)
    if before.due_us is not None and entry.has_schedule_of(before.entry):
        due_us = before.due_us
    return _next(before, due_us, now_us, entry=entry.text)


def sent_again(state: State, now_us: int) -> State | None:
    """If workers must publish the waiting message again, return the new state, else None.

    The broker may have lost an overdue message. So workers publish the message again 1, 2, 4, 8, …
    minutes after the due time. If workers receive several copies, only the first copy runs.
    A message that could not be published is published at once.
    """
    if state.due_us is None:
        return None
    if state.id is None and state.problem is not None:
        return replace(state, sent_us=now_us, problem=None)
    wait_us = max(OVERDUE_US, state.sent_us - state.due_us)
    is_late = now_us - max(state.due_us, state.sent_us) > wait_us
    return replace(state, sent_us=now_us) if is_late else None


def advanced(
    state: State,
    entry: ScheduleEntry,
    task_id: str,
    now_us: int,
    catch_up: CatchUp,
    discarded: Discarded | None = None,
    *,
    deadline_us: int | None = None,
) -> State:
    """Return the schedule entry's state after a worker received the waiting message.

    *task_id* is the message's task id. *catch_up* is ``native_delay_schedules_catch_up``.
    *discarded* is set if Celery will not run the task. A crontab that is later than *deadline_us*
    (microseconds) does not run; None is no deadline.
    """
    due_us = state.due_us
    assert due_us is not None
    state = state if state.left_out else replace(state, left_outs=0)
    next_us, missed, runs = entry.next_us(due_us), 0, True
    if next_us is not None and next_us <= now_us:
        missed = state.missed + 1
        if catch_up != "all" or missed >= MOST_MISSED:
            next_us, missed = _later_us(entry, due_us, next_us, now_us), 0
        runs = catch_up != "none"
    if deadline_us is not None and isinstance(entry.schedule, crontab):
        since_us = now_us - deadline_us - 1
        # Unless each missed run happens, this run stands for the newest of them.
        newest_us = None if catch_up == "all" else entry.next_us(since_us)
        is_timely = due_us > since_us or (newest_us is not None and newest_us <= now_us)
        runs = runs and is_timely
    if not runs and discarded is None:
        return _next(_left_out(state, MISSED), next_us, now_us)
    next_us = None if entry.one_off else next_us
    if discarded is not None:
        state = _left_out(state, EXPIRED) if discarded == "expired" else state
        return _next(state, next_us, now_us, missed=missed)
    ran = {"ran": task_id, "runs": state.runs + 1, "last_us": now_us, "left_out": None}
    return _next(state, next_us, now_us, missed=missed, **ran)


def left_out(snapshot: Snapshot, *, task_id: str, why: str | None) -> Change[None]:
    """Return the :class:`Change` that stores that the occurrence *task_id* did not run after all.

    *why* is None if the occurrence was cancelled.
    """
    state = State.from_text(snapshot.text)
    if state is None or task_id not in (state.id, state.ran):
        return Change(snapshot.text, 0, None)
    if task_id == state.ran:
        state = replace(state, ran=None, runs=state.runs - 1)
    if why is not None:
        state = _left_out(state, why)
    return Change(state.encoded(), snapshot.now_us + KEPT_US, None)


def why_dropped(
    before: State | None, after: State | None, task_id: str, *, redelivered: bool
) -> str | None:
    """Return the reason why a worker must drop a schedule entry's message; None to run its task.

    *before* is the entry's stored state when the message arrived. *after* is the new state, or None
    if the entry does not wait for this message any more. Then the worker drops the message. The
    only exception: if the message is redelivered, or if *task_id* is the id of the last run, the
    task runs again, because the first worker may have died.
    """
    if after is not None:
        counted = 0 if before is None else before.left_outs
        return MISSED if after.left_out == MISSED and after.left_outs > counted else None
    if before is not None and (redelivered or task_id == before.ran):
        return None
    return "another occurrence of its schedule entry took its place"


def paused(state: State) -> State:
    """Return *state* as paused, without a due time."""
    return replace(state, paused=True, due_us=None, number=state.number + 1)


def resumed(state: State, entry: ScheduleEntry, now_us: int) -> State:
    """Return an unpaused copy of *state*, with the next due time."""
    return _next(state, _first_us(entry, state, now_us), now_us, paused=False)


def swapped(snapshot: Snapshot, *, before: State | None, after: State) -> Change[bool]:
    """Return the :class:`Change` from the state *before* to the state *after*.

    If another process has stored a different state, that state stays, and ``Change.answer`` is
    False. The only exception: if *after* is already stored, ``Change.answer`` is True.
    """
    stored = State.from_text(snapshot.text)
    if stored != before:
        return Change(snapshot.text, 0, stored == after)  # an earlier attempt may have been ours
    has_message = after.due_us is not None and after.problem is None
    due_us = max(after.due_us or 0, snapshot.now_us) if has_message else None
    kept_us = snapshot.now_us + KEPT_US
    return Change(after.encoded(), kept_us, True, due_us, replaces=bool(snapshot.messages))


def refused(snapshot: Snapshot, *, problem: str) -> Change[None]:
    """Return the :class:`Change` that stores why an entry's next message is not published."""
    state = State.from_text(snapshot.text) or State("")
    if state.problem == problem:
        return Change(snapshot.text, 0, None)
    return Change(replace(state, problem=problem).encoded(), snapshot.now_us + KEPT_US, None)


def _left_out(state: State, why: str) -> State:
    return replace(state, left_out=why, left_outs=state.left_outs + 1)


def _next(state: State, due_us: int | None, now_us: int, *, missed: int = 0, **new: Any) -> State:
    number = state.number + 1
    new = {"missed": missed, "problem": None, **new}
    return replace(state, number=number, due_us=due_us, sent_us=now_us, **new)


def _first_us(entry: ScheduleEntry, state: State, now_us: int) -> int | None:
    if not entry.one_off or (entry.ends_us is not None and entry.ends_us < now_us):
        return entry.next_us(now_us)
    # The workers may read a one-off entry after its only time. Then the entry runs late.
    if state.runs and not entry.is_armed_since(state.entry):
        return None
    return entry.next_us(now_us) or entry.next_us(0)


def _later_us(entry: ScheduleEntry, due_us: int, next_us: int, now_us: int) -> int | None:
    """Return the first due time after *now_us*.

    An interval keeps its rhythm: an hourly task that was due at 10:05 is next due at 13:05 if the
    time is now 12:30.
    """
    if not hasattr(entry.schedule, "run_every"):
        return entry.next_us(now_us)
    return entry.next_us(now_us - (now_us - due_us) % max(next_us - due_us, 1))
