"""Delays rate-limited tasks in a worker until their rate permits the start.

The tasks with the same name and key form a queue, called *line*, in Redis or a database. The queue
gives each task a *place*, which determines the start time of the task.

- A task with a near start time waits in the worker, and the worker raises the prefetch count by
  one. Other tasks go back to the broker until shortly before the start time.
- In each worker, only the first task of each queue asks Redis or the database for a start.
- A task starts only if the pool has a free process. Until then, later tasks in the worker also
  wait.
"""

from __future__ import annotations

import re
from bisect import insort
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial, wraps
from inspect import Signature
from itertools import islice, takewhile
from typing import Any

from celery.utils.log import get_logger
from celery.worker import state

from ..app.installation import delaying_channel
from ..errors import RecordsUnavailable, described
from ..now import utc_now
from ..rates.line import Lines
from ..rates.rate import Rate
from ..rates.retry_after import RetryAfter
from ..records.waiting import PLACE
from ..settings import DelaySettings
from .arrival import SHORTEST_WAIT_US, Arrival, AskAgain, Ruling, WaitUntil

logger = get_logger(__name__)

_DIGITS = re.compile("[0-9]{1,19}")

#: Places further ahead than ten years are ignored: a forged one could stop the line for ever.
_FARTHEST_US = 10 * 365 * 86_400_000_000

#: Seconds until the first task that waits for a free process looks again; the second waits twice as
#: long, and so on for the first 25, as a worker may have thousands.
LOOK_SECONDS = 0.002
_LOOKING = 25

#: Microseconds after which a task that waits for a process and does not ask again is forgotten.
_FORGOTTEN_US = 1_000_000


@dataclass(eq=False)
class _InLine:
    """A rate-limited task in this worker.

    *line* is the task's name and key. *place* is the task's position in the queue with this name
    and key. *again* makes the worker check the task again.
    """

    tag: Any
    line: tuple[str, str | None]
    place: int | None
    again: Callable[[], object] | None = None


class Rated:
    """Delays rate-limited tasks in a worker until their rate permits the start."""

    def __init__(self, settings: DelaySettings, tasks: Mapping[str, Any]) -> None:
        self.lines: Lines | None = None
        self.come_back_late_us = SHORTEST_WAIT_US
        self._rates = settings.rate_by_task
        self.signatures = signatures(self._rates, tasks)
        #: The longest wait in the broker. After that a task goes back again, with its place.
        self._longest_us = round(settings.longest_delay_seconds * 900_000)
        #: Tasks that wait for a free process, oldest first: when they asked last, by delivery tag.
        self._for_process: dict[Any, int] = {}
        #: The tasks with a place in this worker: by delivery tag, and by line in order of places.
        self._by_tag: dict[Any, _InLine] = {}
        self._by_line: dict[tuple[str, str | None], list[_InLine]] = {}
        self._warned = False

    def __call__(self, arrival: Arrival) -> Ruling | None:
        rate = self._rates.get(arrival.name)
        if rate is None:
            # A task without a rate only waits until the rate-limited tasks before it have started.
            return self._wait_for_process(arrival, 1) if self._for_process else None
        entry = self._by_tag.get(arrival.message.delivery_tag) or self._task_of(arrival, rate)
        if entry.place is not None and not self._is_first(entry):
            return self._ask_when_first(entry)
        wait = self._wait_for_process(arrival, _free_processes(arrival.consumer))
        if entry.place is not None and wait is not None:
            return wait
        return self._ask_line(arrival, rate, entry, wait)

    def begin(self, lines: Lines) -> None:
        """Use *lines* as storage of the queues, and forget the lost connection's tasks."""
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

    def _task_of(self, arrival: Arrival, rate: Rate) -> _InLine:
        signature, message = self.signatures.get(arrival.name), arrival.message
        call = partial(_arguments, arrival)
        key = _key_of(arrival.name, arrival.id, rate, signature, call, arrival.fields)
        place = _place(message.headers, key, arrival.now_us)
        entry = _InLine(message.delivery_tag, (arrival.name, key), place)
        if entry.place is not None:
            self._enter(entry)
        return entry

    def _enter(self, entry: _InLine) -> None:
        self._by_tag[entry.tag] = entry
        insort(self._by_line.setdefault(entry.line, []), entry, key=lambda other: other.place or 0)

    def _is_first(self, entry: _InLine) -> bool:
        return self._by_line[entry.line][0] is entry

    def _ask_when_first(self, entry: _InLine) -> AskAgain:
        """Let a task wait until it is the first of its queue in this worker.

        The waiting task counts toward the prefetch limit only if the first task waits for a free
        process.
        """
        self._for_process.pop(entry.tag, None)
        beside = self._by_line[entry.line][0].tag not in self._for_process

        def note(again: Callable[[], object]) -> None:
            entry.again = again

        return AskAgain(0.0, beside_prefetch=beside, from_here=True, once=note)

    def _remove(self, entry: _InLine) -> None:
        """Remove a task that starts or is requeued, and check the next task."""
        self._for_process.pop(entry.tag, None)
        if self._by_tag.pop(entry.tag, None) is None:
            return
        others = self._by_line[entry.line]
        others.remove(entry)
        if not others:
            del self._by_line[entry.line]
        elif (again := others[0].again) is not None:
            others[0].again = None
            again()

    # --- waiting for a free process ----------------------------------------------------------

    def _wait_for_process(self, arrival: Arrival, room: int) -> AskAgain | None:
        """Return None if fewer than *room* earlier tasks wait for a pool process."""
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

    def _ask_line(
        self, arrival: Arrival, rate: Rate, entry: _InLine, wait: AskAgain | None
    ) -> Ruling | None:
        """Ask whether the task starts, waits in the worker, or returns to the broker."""
        headers, (task, key) = arrival.message.headers, entry.line
        may_start = wait is None and (entry.place is not None or entry.line not in self._by_line)
        try:
            if self.lines is None:
                raise RecordsUnavailable("native delay is off in this worker")
            turn = self.lines.ask(task, key, rate, entry.place, may_start=may_start)
        except RecordsUnavailable as exc:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "native delay: rate-limited tasks wait until the rates can be read: %s", exc
                )
            self._remove(entry)
            return arrival.until_records_answer()
        self._warned = False
        if turn.starts:
            if headers.pop(PLACE, None) is not None:
                arrival.message.waited_in_line = True
            self._remove(entry)
            return None
        kept = {PLACE: _header(turn.place, key)}
        headers.update(kept)
        again = AskAgain(turn.wait_us / 1e6, beside_prefetch=True, from_here=True)
        ahead_us = self.come_back_late_us
        if turn.wait_us > ahead_us + SHORTEST_WAIT_US:
            self._remove(entry)
            wait_us = min(turn.wait_us - ahead_us, self._longest_us)
            return WaitUntil(arrival.now_us + wait_us, None, again, kept)
        if entry.place is None:
            entry.place = turn.place
            self._enter(entry)
            if not self._is_first(entry):
                return self._ask_when_first(entry)
        if wait is not None and turn.wait_us == 0:
            return wait
        self._for_process.pop(entry.tag, None)
        return again


def _key_of(
    task: str,
    task_id: str,
    rate: Rate,
    signature: Signature | None,
    call: Callable[[], tuple[Any, Any]],
    headers: Mapping[str, Any],
) -> str | None:
    """Return the key of a rate-limited call, or None if no key is found."""
    if rate.key is None:
        return None
    try:
        return rate.key_of(*call(), headers, signature)
    except Exception as exc:  # the user's callable or a malformed message may raise anything
        logger.error(
            "native delay: cannot compute the rate key of %s[%s], it shares the rate of tasks "
            "without a key: %s",
            task,
            task_id,
            described(exc),
        )
        return None


def _free_processes(consumer: Any) -> int:
    return max(consumer.pool.num_processes or 1, 1) - len(state.reserved_requests)


def _arguments(arrival: Arrival) -> tuple[list[Any], dict[str, Any]]:
    if not arrival.has_headers:
        return list(arrival.fields.get("args") or ()), dict(arrival.fields.get("kwargs") or {})
    payload = arrival.message.payload
    if isinstance(payload, dict):  # from another language, with the headers of protocol 2
        return list(payload.get("args") or ()), dict(payload.get("kwargs") or {})
    return payload[0], payload[1]


def _header(place: int | None, key: str | None) -> str:
    return str(place) if key is None else f"{place} {key}"


def _place(headers: Mapping[str, Any], key: str | None, now_us: int) -> int | None:
    header = headers.get(PLACE)
    place, separator, kept = header.partition(" ") if isinstance(header, str) else ("", "", "")
    if not _DIGITS.fullmatch(place) or (kept if separator else None) != key:
        return None
    found = int(place)
    return found if found <= now_us + _FARTHEST_US else None


def signatures(rates: Mapping[str, Rate], tasks: Mapping[str, Any]) -> dict[str, Signature]:
    """Return the Python function signature of each rate-limited task, by task name.

    Raises SettingsError if the key of a rate is not an argument of the function.
    """
    found = {}
    for name, rate in rates.items():
        task = tasks.get(name)
        if task is None:
            logger.warning("native delay: native_delay_rates: this app has no task %s", name)
        elif (known := rate.signature_of(name, task.run)) is not None:
            found[name] = known
    return found


# ---- RetryAfter --------------------------------------------------------------------------------


def teach_retry_after(app: Any, rates: Mapping[str, Rate], known: Mapping[str, Signature]) -> None:
    """Wrap the functions of rate-limited tasks, so that RetryAfter retries the task.

    The worker calls this function before the pool forks.
    """
    for name, rate in rates.items():
        task = app.tasks.get(name)
        if task is None:
            continue
        # Inside Celery's autoretry, which would handle it like any other error.
        attribute = "_orig_run" if hasattr(task, "_orig_run") else "run"
        run = getattr(task, attribute)
        if not hasattr(run, "native_delay_original"):
            setattr(task, attribute, _retrying(app, task, run, rate, known.get(name)))


def _retrying(
    app: Any, task: Any, run: Callable[..., Any], rate: Rate, known: Signature | None
) -> Callable[..., Any]:
    @wraps(run)
    def until_retry_after(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RetryAfter as exc:
            if task.request.called_directly or task.request.is_eager:
                raise
            seconds = exc.seconds(utc_now())
            headers = dict(task.request.as_execution_options().get("headers") or {})
            headers.pop(PLACE, None)
            key = _key_of(task.name, task.request.id, rate, known, lambda: (args, kwargs), headers)
            try:
                headers[PLACE] = _header(_hold(app, task.name, key, rate, seconds), key)
            except Exception as problem:  # the task is retried all the same
                logger.error(
                    "native delay: RetryAfter holds only this task, not others of %s: %s",
                    task.name,
                    described(problem),
                )
            raise task.retry(countdown=seconds, exc=exc, headers=headers) from exc

    until_retry_after.native_delay_original = run  # type: ignore[attr-defined]
    return until_retry_after


def _hold(app: Any, task: str, key: str | None, rate: Rate, seconds: float) -> int:
    with app.connection_or_acquire() as connection:
        channel, settings = delaying_channel(app, connection)
        with closing(channel.lines(settings)) as lines:
            place: int = lines.hold(task, key, rate, seconds)
    return place
