"""Delays rate-limited tasks in a worker until their rate permits the start.

The waiting tasks with the same rate limit and key form a *line* in Redis or a database. The line
gives each task a *place* (a number). The planned start time of the task depends on its place.

- A task with a near start time waits in the worker, and the worker raises the prefetch count by
  one. Other tasks go back to the broker until shortly before the start time.
- In each worker, only the first task of each line asks Redis or the database if it may start now.
- A task starts only if the pool has a free process. Until then, later tasks in the worker also
  wait.
"""

from __future__ import annotations

import json
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Signature
from itertools import islice, takewhile
from typing import Any

from celery.utils.log import get_logger
from celery.worker import state

from ..app.retrying import limit_of_call
from ..errors import StoreUnavailable
from ..rates.in_records import RecordedLines
from ..rates.line import Asked, places_in
from ..rates.rate import Rate
from ..records.waiting import PLACE
from ..settings import DelaySettings
from .arrival import SHORTEST_WAIT_US, Arrival, AskAgain, Ruling, WaitUntil
from .in_time import StoreGate, in_time
from .unique import give_back, take_locks

logger = get_logger(__name__)

#: Seconds until the first task that waits for a free process is checked again. The second task is
#: checked after twice as long, and so on up to the 25th task, as a worker may have thousands.
LOOK_SECONDS = 0.002
_LOOKING = 25

#: A task that waits for a process is forgotten if it is not checked again for so many microseconds.
_FORGOTTEN_US = 1_000_000


@dataclass(eq=False)
class _InLine:
    """A rate-limited task in this worker, with its rate limits.

    *tag* is the message's delivery tag. *limit* is the rate limit for which the task waits. *again*
    makes the worker check the task again.
    """

    tag: Any
    limits: list[Asked]
    limit: Asked
    again: Callable[[], object] | None = None


class Rated(StoreGate):
    """Delays rate-limited tasks in a worker until their rate permits the start."""

    waits = "rate-limited tasks wait until the rates can be read"

    def __init__(self, settings: DelaySettings, tasks: Mapping[str, Any]) -> None:
        self.lines: RecordedLines | None = None
        self.come_back_late_us = SHORTEST_WAIT_US
        self._rates = settings.rates_by_task
        self._signatures = signatures(self._rates, tasks)
        #: The longest wait in the broker. Then the task returns to the broker, with the same place.
        self._longest_us = round(settings.longest_delay_seconds * 900_000)
        #: Tasks that wait for a free process, oldest first: tag, and time of the last check.
        self._for_process: dict[Any, int] = {}
        #: The tasks with a place in this worker: by delivery tag, and by line in order of places.
        self._by_tag: dict[Any, _InLine] = {}
        self._by_line: dict[str, list[_InLine]] = {}

    def __call__(self, arrival: Arrival) -> Ruling | None:
        rates = self._rates.get(arrival.name)
        if rates is None:
            # A task without a rate only waits until the rate-limited tasks before it have started.
            return self._wait_for_process(arrival, 1) if self._for_process else None
        entry = self._by_tag.get(arrival.message.delivery_tag) or self._task_of(arrival, rates)
        if entry.limit.place is not None and (ahead_us := self._behind_first_us(entry)):
            if ahead_us <= self.come_back_late_us:
                return self._ask_when_first(entry)
            return self._ask_line(arrival, entry, AskAgain(LOOK_SECONDS))
        processes = max(arrival.consumer.pool.num_processes or 1, 1)
        wait = self._wait_for_process(arrival, processes - len(state.reserved_requests))
        if entry.limit.place is not None and wait is not None:
            return wait
        return self._ask_line(arrival, entry, wait)

    def begin(self, lines: RecordedLines) -> None:
        """Use *lines* as the storage of all lines, and forget the lost connection's tasks."""
        self.close()
        self.lines = lines
        self._for_process.clear()
        self._by_tag.clear()
        self._by_line.clear()

    def close(self) -> None:
        if self.lines is not None:
            self.lines.close()
            self.lines = None

    # --- the order of a line -----------------------------------------------------------------

    def _task_of(self, arrival: Arrival, rates: Sequence[Rate]) -> _InLine:
        message = arrival.message
        places = places_in(message.headers.get(PLACE))
        limits = [
            limit._replace(place=places.get(limit.line)) for limit in self._limits(arrival, rates)
        ]
        first = next((limit for limit in limits if limit.place is not None), limits[0])
        entry = _InLine(message.delivery_tag, limits, first)
        if entry.limit.place is not None:
            self._enter(entry)
        return entry

    def keys_of(self, arrival: Arrival) -> set[str | None]:
        """Return the keys of a task's rate limits."""
        return {limit.key for limit in self._limits(arrival, self._rates.get(arrival.name, ()))}

    def _limits(self, arrival: Arrival, rates: Sequence[Rate]) -> list[Asked]:
        signature, call = self._signatures.get(arrival.name), partial(_arguments, arrival)
        name, task_id, headers = arrival.name, arrival.id, arrival.fields
        return [limit_of_call(name, task_id, rate, signature, call, headers) for rate in rates]

    def _enter(self, entry: _InLine) -> None:
        self._by_tag[entry.tag] = entry
        line = self._by_line.setdefault(entry.limit.line, [])
        insort(line, entry, key=lambda other: other.limit.place or 0)

    def _behind_first_us(self, entry: _InLine) -> int:
        """Microseconds from the line's first task in this worker to this task; 0 for the first."""
        first, limit = self._by_line[entry.limit.line][0], entry.limit
        places = (limit.place or 0) - (first.limit.place or 0)
        return 0 if first is entry else max(places, 1) * limit.rate.spacing_us

    def _ask_when_first(self, entry: _InLine) -> AskAgain:
        """Let a task wait until it is the first task of its line in this worker.

        The waiting task counts toward the prefetch limit only if the first task waits for a free
        process.
        """
        self._for_process.pop(entry.tag, None)
        beside = self._by_line[entry.limit.line][0].tag not in self._for_process
        note = partial(setattr, entry, "again")
        return AskAgain(0.0, beside_prefetch=beside, from_here=True, begin_when=note)

    def _remove(self, entry: _InLine) -> None:
        """Remove a task that starts or is requeued from its line, and check the next task."""
        self._for_process.pop(entry.tag, None)
        if self._by_tag.pop(entry.tag, None) is None:
            return
        others = self._by_line[entry.limit.line]
        others.remove(entry)
        if not others:
            del self._by_line[entry.limit.line]
        elif (again := others[0].again) is not None:
            others[0].again = None
            again()

    # --- waiting for a free process ----------------------------------------------------------

    def _wait_for_process(self, arrival: Arrival, room: int) -> AskAgain | None:
        """Return None if fewer than *room* earlier tasks wait for a process; else check again."""
        waiting, tag = self._for_process, arrival.message.delivery_tag
        while waiting and next(iter(waiting.values())) < arrival.now_us - _FORGOTTEN_US:
            del waiting[next(iter(waiting))]  # its connection was lost
        waiting[tag] = arrival.now_us
        before = takewhile(lambda other: other != tag, islice(waiting, _LOOKING))
        ahead = sum(1 for _ in before)
        if ahead >= room:
            return AskAgain(LOOK_SECONDS * (ahead + 1), from_here=True)
        del waiting[tag]
        return None

    # --- asking the line ---------------------------------------------------------------------

    def _ask_line(self, arrival: Arrival, entry: _InLine, wait: AskAgain | None) -> Ruling | None:
        """Ask if the task may start; *wait* is a decision to wait, or None if a process is free."""
        headers = arrival.message.headers
        # A new task gets its place first, so that it has no lock while it waits for its turn.
        is_behind = entry.limit.place is None and any(
            limit.line in self._by_line or limit.rate.concurrent for limit in entry.limits
        )
        may_start = wait is None and not is_behind
        try:
            if self.lines is None:
                raise StoreUnavailable("native delay is off in this worker")
            if may_start and (free_us := take_locks(arrival, entry.limits)) is not None:
                self._remove(entry)
                again = AskAgain(max(free_us - arrival.now_us, SHORTEST_WAIT_US) / 1e6)
                kept = {PLACE: headers[PLACE]} if PLACE in headers else {}
                return WaitUntil(free_us, None, again, kept)
            turn = in_time(partial(self.lines.ask, entry.limits, may_start=may_start))
        except Exception as exc:
            give_back(arrival.consumer, headers)
            self._remove(entry)
            return self.unanswered(arrival, exc)
        self.answered()
        if turn.starts:
            if headers.pop(PLACE, None) is not None:
                arrival.message.waited_in_line = True
            self._remove(entry)
            return None
        give_back(arrival.consumer, headers)
        limit = entry.limits[turn.at]._replace(place=turn.place)
        if entry.tag in self._by_tag and limit != entry.limit:
            self._remove(entry)
        entry.limits[turn.at] = entry.limit = limit
        places = {each.line: each.place for each in entry.limits if each.place is not None}
        kept = {PLACE: json.dumps(places)}
        headers.update(kept)
        again = AskAgain(turn.wait_us / 1e6, beside_prefetch=True, from_here=True)
        ahead_us = self.come_back_late_us
        if turn.wait_us > ahead_us + SHORTEST_WAIT_US:
            self._remove(entry)
            wait_us = min(turn.wait_us - ahead_us, self._longest_us)
            return WaitUntil(arrival.now_us + wait_us, None, again, kept)
        if entry.tag not in self._by_tag:
            self._enter(entry)
        if self._behind_first_us(entry):
            return self._ask_when_first(entry)
        if wait is not None and turn.wait_us == 0:
            return wait
        self._for_process.pop(entry.tag, None)
        return again


def _arguments(arrival: Arrival) -> tuple[list[Any], dict[str, Any]]:
    if not arrival.has_headers:
        return list(arrival.fields.get("args") or ()), dict(arrival.fields.get("kwargs") or {})
    payload = arrival.message.payload
    if isinstance(payload, dict):  # from another language, with the headers of protocol 2
        return list(payload.get("args") or ()), dict(payload.get("kwargs") or {})
    return payload[0], payload[1]


def signatures(rates: Mapping[str, Any], tasks: Mapping[str, Any]) -> dict[str, Signature]:
    """Return the Python function signature of each rate-limited task, by task name.

    Raises SettingsError if the key of a rate is not an argument of the function.
    """
    found = {}
    for name, its in rates.items():
        task = tasks.get(name)
        if task is None:
            logger.warning("native delay: native_delay_rates: this app has no task %s", name)
            continue
        for rate in its:
            if (known := rate.signature_of(name, task.run)) is not None:
                found[name] = known
    return found
