"""The gate for tasks that have a rate: each starts, or waits in the broker for its turn.

The line of a task is asked in the consumer's thread, in one round trip. A turn that is near is
waited for here, beside the prefetch limit; what waits in the broker comes back a little sooner than
its turn, for a broker is not as exact as a worker's timer.

Of the tasks of one line that a worker has, only the one with the first place asks: the others wait
behind it, so the worker hands them over in the order of their places.

A rated task is handed to the pool only while that has a free process: else what passes between gate
and start would be as long as the tasks before it. It waits at the door, and others that come
meanwhile wait behind it.
"""

from __future__ import annotations

import re
from bisect import insort
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial, wraps
from inspect import Signature
from itertools import islice, takewhile
from typing import Any

from celery.utils.log import get_logger
from celery.worker import state

from ..app.installation import delaying_channel
from ..errors import RecordsUnavailable, described
from ..rates.lines import Lines
from ..rates.rate import Rate
from ..rates.retry_after import RetryAfter
from ..records.waiting import PLACE
from ..settings import DelaySettings
from .arrival import SHORTEST_WAIT_US, Arrival, AskAgain, Ruling, WaitUntil

logger = get_logger(__name__)

_DIGITS = re.compile("[0-9]{1,19}")

#: A place is at most ten years ahead: a forged one could close the line for longer, or break it.
_FARTHEST_US = 10 * 365 * 86_400_000_000

#: Until the first at the door looks again whether a process is free; the second twice as long, and
#: so on to the last of so many, for a worker may have thousands.
DOOR_SECONDS = 0.002
_LOOKING_OFTEN = 25

#: For so long the first at the door keeps others behind it, unless it asks again.
_AT_DOOR_US = 1_000_000


@dataclass(eq=False)
class _Standing:
    """A task that a worker has, in its *line* of task and key; a newcomer has no *place* yet.

    *again* has it ask again, if it waits behind another.
    """

    tag: Any
    line: tuple[str, str | None]
    place: int | None
    again: Callable[[], object] | None = None


class Rated:
    """The gate for tasks that have a rate; without *lines* they wait, as while these are away."""

    def __init__(self, settings: DelaySettings, tasks: Mapping[str, Any]) -> None:
        """*tasks* are the app's, by name."""
        self.lines: Lines | None = None
        self.come_back_late_us = SHORTEST_WAIT_US
        self._rates = settings.rate_by_task
        self.signatures = signatures(self._rates, tasks)
        #: What waits for longer comes back in between, and keeps its place.
        self._longest_us = round(settings.longest_delay_seconds * 900_000)
        #: By delivery tag, when those at the door asked last, the first to come first.
        self._at_door: dict[Any, int] = {}
        #: By delivery tag, the tasks that stand in line here; and by line, the first place first.
        self._standing: dict[Any, _Standing] = {}
        self._here: dict[tuple[str, str | None], list[_Standing]] = {}
        self._told = False

    def __call__(self, arrival: Arrival) -> Ruling | None:
        rate = self._rates.get(arrival.name)
        if rate is None:
            # It needs no free process, only that those before it are in.
            return self._door(arrival, 1) if self._at_door else None
        one = self._standing.get(arrival.message.delivery_tag) or self._standing_of(arrival, rate)
        if one.place is not None and not self._is_first(one):
            return self._behind(one)
        door = self._door(arrival, _free_processes(arrival.consumer))
        if one.place is not None and door is not None:
            return door
        return self._turn(arrival, rate, one, door)

    def begin(self, lines: Lines) -> None:
        """Ask *lines* over a new connection; the broker delivers again what stood here."""
        self.close()
        self.lines = lines
        self._at_door.clear()
        self._standing.clear()
        self._here.clear()

    def close(self) -> None:
        """Give up the connection to the lines."""
        if self.lines is not None:
            self.lines.close()
            self.lines = None

    # --- the order of a line -----------------------------------------------------------------

    def _standing_of(self, arrival: Arrival, rate: Rate) -> _Standing:
        signature, message = self.signatures.get(arrival.name), arrival.message
        call = partial(_arguments, arrival)
        key = _key_of(arrival.name, arrival.id, rate, signature, call, arrival.fields)
        place = _place(message.headers, key, arrival.now_us)
        one = _Standing(message.delivery_tag, (arrival.name, key), place)
        if one.place is not None:
            self._stand(one)
        return one

    def _stand(self, one: _Standing) -> None:
        self._standing[one.tag] = one
        insort(self._here.setdefault(one.line, []), one, key=lambda other: other.place or 0)

    def _is_first(self, one: _Standing) -> bool:
        return self._here[one.line][0] is one

    def _behind(self, one: _Standing) -> AskAgain:
        """It asks again once it is the first; those behind one at the door count as prefetched."""
        self._at_door.pop(one.tag, None)
        beside = self._here[one.line][0].tag not in self._at_door

        def note(again: Callable[[], object]) -> None:
            one.again = again

        return AskAgain(0.0, beside_prefetch=beside, from_here=True, once=note)

    def _leave(self, one: _Standing) -> None:
        """It starts, or goes back into the broker: the next one asks."""
        self._at_door.pop(one.tag, None)
        if self._standing.pop(one.tag, None) is None:
            return
        others = self._here[one.line]
        others.remove(one)
        if not others:
            del self._here[one.line]
        elif (again := others[0].again) is not None:
            others[0].again = None
            again()

    # --- the door ----------------------------------------------------------------------------

    def _door(self, arrival: Arrival, room: int) -> AskAgain | None:
        """None for one that may go in; it is not at the door any more."""
        waiting, tag = self._at_door, arrival.message.delivery_tag
        while waiting and next(iter(waiting.values())) < arrival.now_us - _AT_DOOR_US:
            del waiting[next(iter(waiting))]  # its connection is gone
        waiting[tag] = arrival.now_us
        before = takewhile(lambda other: other != tag, islice(waiting, _LOOKING_OFTEN))
        ahead = sum(1 for _ in before)
        if ahead >= room:
            return AskAgain(DOOR_SECONDS * (ahead + 1), from_here=True)
        del waiting[tag]
        return None

    # --- the turn ----------------------------------------------------------------------------

    def _turn(
        self, arrival: Arrival, rate: Rate, one: _Standing, door: AskAgain | None
    ) -> Ruling | None:
        """The ruling by the line's answer; a newcomer starts only if it would be the first here."""
        headers, (task, key) = arrival.message.headers, one.line
        may_start = door is None and (one.place is not None or one.line not in self._here)
        try:
            if self.lines is None:
                raise RecordsUnavailable("native delay is off in this worker")
            turn = self.lines.ask(task, key, rate, one.place, may_start=may_start)
        except RecordsUnavailable as exc:
            if not self._told:
                self._told = True
                logger.warning(
                    "native delay: tasks that have a rate wait until it answers: %s", exc
                )
            self._leave(one)
            return arrival.until_records_answer()
        self._told = False
        if turn.starts:
            if headers.pop(PLACE, None) is not None:
                arrival.message.waited_in_line = True
            self._leave(one)
            return None
        kept = {PLACE: _header(turn.place, key)}
        headers.update(kept)
        again = AskAgain(turn.wait_us / 1e6, beside_prefetch=True, from_here=True)
        ahead_us = self.come_back_late_us
        if turn.wait_us > ahead_us + SHORTEST_WAIT_US:
            self._leave(one)
            wait_us = min(turn.wait_us - ahead_us, self._longest_us)
            return WaitUntil(arrival.now_us + wait_us, None, again, kept)
        if one.place is None:
            one.place = turn.place
            self._stand(one)
            if not self._is_first(one):
                return self._behind(one)
        if door is not None and turn.wait_us == 0:
            return door
        self._at_door.pop(one.tag, None)
        return again


def _key_of(
    task: str,
    task_id: str,
    rate: Rate,
    signature: Signature | None,
    call: Callable[[], tuple[Any, Any]],
    headers: Mapping[str, Any],
) -> str | None:
    """The key of a task, with the arguments of its *call*; None for none, or if it fails."""
    if rate.key is None:
        return None
    try:
        return rate.key_of(*call(), headers, signature)
    except Exception as exc:  # of a callable of the user's, or of a message that is no task
        logger.error(
            "native delay: the key of %s[%s] cannot be told, it stands in the line of tasks "
            "without one: %s",
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
    if isinstance(payload, dict):  # of another language, with headers as in protocol 2
        return list(payload.get("args") or ()), dict(payload.get("kwargs") or {})
    return payload[0], payload[1]


def _header(place: int | None, key: str | None) -> str:
    return str(place) if key is None else f"{place} {key}"


def _place(headers: Mapping[str, Any], key: str | None, now_us: int) -> int | None:
    """The place that a message has in the line of *key*; None for a newcomer."""
    header = headers.get(PLACE)
    place, separator, kept = header.partition(" ") if isinstance(header, str) else ("", "", "")
    if not _DIGITS.fullmatch(place) or (kept if separator else None) != key:
        return None
    found = int(place)
    return found if found <= now_us + _FARTHEST_US else None


def signatures(rates: Mapping[str, Rate], tasks: Mapping[str, Any]) -> dict[str, Signature]:
    """Signatures of the rated tasks' functions, by name.

    SettingsError: a rate's key is no argument of its task.
    """
    found = {}
    for name, rate in rates.items():
        task = tasks.get(name)
        if task is None:
            logger.warning("native delay: native_delay_rates names %s, no task of this app", name)
        elif (known := rate.signature_of(name, task.run)) is not None:
            found[name] = known
    return found


# ---- RetryAfter --------------------------------------------------------------------------------


def teach_retry_after(app: Any, rates: Mapping[str, Rate], known: Mapping[str, Signature]) -> None:
    """Let the rated tasks of *app* be retried with RetryAfter; before the pool forks.

    *known* are the tasks' :func:`signatures`.
    """
    for name, rate in rates.items():
        task = app.tasks.get(name)
        if task is None:
            continue
        # Beneath Celery's autoretry, which would take it for any other error.
        attribute = "_orig_run" if hasattr(task, "_orig_run") else "run"
        run = getattr(task, attribute)
        if not hasattr(run, "native_delay_original"):
            setattr(task, attribute, _retrying(app, task, run, rate, known.get(name)))


def _retrying(
    app: Any, task: Any, run: Callable[..., Any], rate: Rate, known: Signature | None
) -> Callable[..., Any]:
    @wraps(run)
    def until_turned_away(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RetryAfter as exc:
            if task.request.called_directly or task.request.is_eager:
                raise
            seconds = exc.seconds(datetime.now(UTC))
            headers = dict(task.request.as_execution_options().get("headers") or {})
            headers.pop(PLACE, None)
            key = _key_of(task.name, task.request.id, rate, known, lambda: (args, kwargs), headers)
            try:
                headers[PLACE] = _header(_hold(app, task.name, key, rate, seconds), key)
            except Exception as problem:  # it is retried all the same
                logger.error(
                    "native delay: the line of %s is not held: %s", task.name, described(problem)
                )
            raise task.retry(countdown=seconds, exc=exc, headers=headers) from exc

    until_turned_away.native_delay_original = run  # type: ignore[attr-defined]
    return until_turned_away


def _hold(app: Any, task: str, key: str | None, rate: Rate, seconds: float) -> int:
    with app.connection_or_acquire() as connection:
        channel, settings = delaying_channel(app, connection)
        with closing(channel.lines(settings)) as lines:
            place: int = lines.hold(task, key, rate, seconds)
    return place
