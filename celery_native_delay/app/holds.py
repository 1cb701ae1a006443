"""``Delay(app).hold``, ``drop``, ``release`` and ``holds``: stop tasks at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from getpass import getuser
from socket import gethostname
from time import sleep
from typing import Any, TypeVar

from celery import Celery, Task

from .. import now
from ..errors import InvalidDueTime, InvalidQuery
from ..now import time_ns
from ..rates.line import RateLine
from ..rates.rate import Rate
from ..records.holds import (
    EDGES_US,
    KEPT_US,
    RECORD,
    Hold,
    decoded,
    encoded,
    free_place,
)
from ..records.interface import Change, Snapshot
from ..records.search import parse
from ..records.waiting import (
    AT_ONCE,
    HELD_FROM_US,
    Outcome,
    Query,
    Waiting,
    WaitingPage,
    WaitingTasks,
)
from .installation import ask_broker
from .schedules import schedule_records

T = TypeVar("T")

#: Seconds after which every worker has read a change of the holds.
TAKEN_UP_SECONDS = 5.0

#: How often this process has changed holds: the test clock reads them after each change.
changes = 0

#: The most tasks that are counted for a hold with an end, whose due times are those of others, too.
_COUNTED = 10_000

#: Called with the number of tasks that were done since the last call, and that of all tasks.
Progress = Callable[[int, int], object]


def _untold(done: int, in_all: int) -> None: ...


class HoldCalls:
    """The calls of ``Delay(app)`` that hold, drop and release tasks."""

    _app: Celery
    _ask: Callable[[Callable[[WaitingTasks], Any]], Any]
    _move: Callable[..., list[Outcome]]
    rates: Callable[..., list[RateLine]]
    end_pause: Callable[[str, str | None], int]

    def hold(
        self,
        task: str | Task,
        *,
        key: str | None = None,
        search: str = "",
        seconds: float | None = None,
        by: str | None = None,
    ) -> Hold:
        """Let no worker start these tasks, until :meth:`release`. They wait in the store.

        Workers follow within five seconds. A second call with the same *task*, *key* and *search*
        changes the hold, or turns a drop into a hold.

        Args:
            task: a task, its name, or a pattern such as "shop.*".
            key: only tasks with this key of a rate, debounce, throttle or unique.
            search: only tasks that match this text, as in :meth:`ls`.
            seconds: the length of the hold; None: until :meth:`release`.
            by: who holds them; by default, user and host of this process.

        Raises:
            InvalidQuery: *task*, *key* or *search* is malformed.
            InvalidDueTime: *seconds* is not above 0.
            NoStore: the broker stores no holds, and ``native_delay_store`` is not set.
        """
        if seconds is not None and not 0 < seconds < 50 * 365 * 86_400:
            raise InvalidDueTime(f"expected seconds above 0 and below 50 years, got {seconds!r}")
        return self._set(_hold(task, key, search, by), seconds)

    def drop(
        self, task: str | Task, *, key: str | None = None, search: str = "", by: str | None = None
    ) -> Hold:
        """Let workers revoke these tasks, held ones too, until :meth:`release`.

        Arguments and errors are as in :meth:`hold`.
        """
        return self._set(replace(_hold(task, key, search, by), mode="drop"), None)

    def holds(self) -> list[Hold]:
        """Return all holds and drops, and the pauses that ``RetryAfter`` began."""
        holds, counts = self._look()
        found = [replace(hold, held=self._held(hold, counts)) for hold in holds]
        for place, count in enumerate(counts):
            if count and all(hold.place != place for hold in holds):
                rows = self._page(Query(from_us=EDGES_US[place], until_us=EDGES_US[place + 1]), 1)
                found += [
                    Hold(task.held.hold, mode="ended", by=task.held.by, held=count)
                    for task in rows
                    if task.held
                ]
        return found + [
            Hold(
                line.task,
                line.key,
                mode="RetryAfter",
                until_us=line.held_until_us,
                held=line.waiting,
            )
            for line in self.rates(limit=1000)
            if line.held_until_us is not None
        ]

    def release(
        self,
        task: str | Task,
        *,
        key: str | None = None,
        search: str = "",
        rate: str | None = None,
        progress: Progress = _untold,
    ) -> int:
        """End a hold, a drop or the pause of a rate; let the held tasks run, oldest first.

        If this call dies, call it again: it lets go what is left.

        Args:
            task: as it was given to :meth:`hold`, with the same *key* and *search*. For a pause of
                ``RetryAfter``, the name and the key of the rate.
            rate: let go so many tasks per period, such as "50/s"; None: all at once.
            progress: called with the number of tasks let go since the last call, and in all.

        Returns:
            the number of tasks that were let go.

        Raises:
            InvalidQuery: there is no such hold.
            SettingsError: *rate* is malformed.
        """
        wanted = _hold(task, key, search, "")
        spacing_us = 0 if rate is None else Rate(rate).spacing_us

        def begun(holds: list[Hold], now_us: int) -> tuple[list[Hold], Hold | None]:
            found = next((hold for hold in holds if hold.name == wanted.name), None)
            if found is None:
                return holds, None
            new = replace(found, mode="release", next_us=max(found.next_us, now_us))
            return [new if hold is found else hold for hold in holds], new

        hold = self._write(begun)
        if hold is None:
            named = [each for each in self.holds() if each.name == wanted.name]
            if any(each.mode == "RetryAfter" for each in named):
                return self.end_pause(wanted.task, key)
            if not named:
                names = ", ".join(each.name for each in self.holds()) or "nothing is held"
                raise InvalidQuery(f"expected the name of a hold ({names}), got {wanted.name!r}")
            hold = wanted
        done = self._let_go(hold, spacing_us, progress)

        def ended(holds: list[Hold], _: int) -> tuple[list[Hold], None]:
            # One that somebody made meanwhile, under the same name, stays.
            return [each for each in holds if each.name != hold.name or each.stops], None

        self._write(ended)
        return done

    # --- private -------------------------------------------------------------------------

    def _set(self, new: Hold, seconds: float | None) -> Hold:
        _, counts = self._look()

        def written(holds: list[Hold], now_us: int) -> tuple[list[Hold], tuple[Hold, Hold | None]]:
            old = next((hold for hold in holds if hold.name == new.name), None)
            until_us = None if seconds is None else now_us + round(seconds * 1_000_000)
            place = free_place(holds, counts)
            made = replace(new, since_us=now_us, until_us=until_us, place=place)
            return [*(hold for hold in holds if hold is not old), made], (made, old)

        made, old = self._write(written)
        if old is not None:  # workers hold or drop its tasks again, as it is now
            self._let_go(old, 0, is_held_again=True)
        return made

    def _let_go(
        self,
        hold: Hold,
        spacing_us: int,
        progress: Progress = _untold,
        *,
        is_held_again: bool = False,
    ) -> int:
        """Give the held tasks new due times; return their number.

        *is_held_again*: workers hold them again at once, perhaps in the same range.
        """
        if now.stopped_at_ns is None:  # no test clock, which reads the holds at once
            sleep(TAKEN_UP_SECONDS)  # until then, workers hold the tasks again
        ranges = self._ranges(hold)
        in_all = sum(map(self._count, ranges))
        done, next_us = 0, hold.next_us

        def due_us(task: Waiting) -> int | None:
            nonlocal next_us
            if not spacing_us:
                return None
            next_us = max(next_us, time_ns() // 1000) + spacing_us
            return next_us

        for query in ranges:
            while not (is_held_again and done >= in_all) and (
                ids := list(dict.fromkeys(task.id for task in self._page(query)))
            ):
                let_go = sum(map(bool, self._move(ids, due_us)))
                if spacing_us:
                    self._note_next(hold, next_us)
                done += let_go
                progress(let_go, in_all)
                if not let_go:
                    break
        return done

    def _note_next(self, hold: Hold, next_us: int) -> None:
        """Let a later call go on with the due times, if this one dies."""
        self._write(
            lambda holds, _: (
                [
                    replace(each, next_us=next_us) if each.name == hold.name else each
                    for each in holds
                ],
                None,
            )
        )

    def _ranges(self, hold: Hold) -> list[Query]:
        """Return where tasks of a hold wait: in ranges of no other hold, and at its own end."""
        holds, counts = self._look()
        others = {each.place for each in holds if each.name != hold.name or each.stops}
        places = [place for place, count in enumerate(counts) if count and place not in others]
        ranges = [(EDGES_US[place], EDGES_US[place + 1]) for place in places]
        if hold.until_us is not None:
            ranges.append(hold.range_us)
        return [Query(from_us=first, until_us=end, hold=hold.name) for first, end in ranges]

    def _look(self) -> tuple[list[Hold], list[int]]:
        """Return the holds, and the numbers of tasks that wait in the ranges of each place."""

        def look(channel: Any, settings: Any) -> tuple[list[Hold], list[int]]:
            seen = schedule_records(channel, settings).read(RECORD)
            with closing(channel.waiting_tasks(settings)) as found:
                counts = found.counts(EDGES_US)
            return [hold for hold in decoded(seen.text) if not hold.is_over(seen.now_us)], counts

        return ask_broker(self._app, look)

    def _held(self, hold: Hold, counts: Sequence[int]) -> int:
        if hold.until_us is None:
            return counts[hold.place]
        first_us, end_us = hold.range_us
        query = Query(from_us=first_us, until_us=end_us, hold=hold.name)
        return len(self._page(query, _COUNTED))

    def _count(self, query: Query) -> int:
        if (query.from_us or 0) >= HELD_FROM_US:  # no other tasks are there
            query = replace(query, hold=None)
        number: int = self._ask(lambda found: found.count(query))
        return number

    def _page(self, query: Query, limit: int = AT_ONCE) -> Sequence[Waiting]:
        page: WaitingPage = self._ask(lambda found: found.page(query, limit=limit))
        return page.tasks

    def _write(self, decide: Callable[[list[Hold], int], tuple[list[Hold], T]]) -> T:
        def change(seen: Snapshot) -> Change[T]:
            holds = [hold for hold in decoded(seen.text) if not hold.is_over(seen.now_us)]
            holds, answer = decide(holds, seen.now_us)
            return Change(encoded(holds), seen.now_us + KEPT_US, answer)

        global changes
        changes += 1
        return ask_broker(self._app, lambda *asked: schedule_records(*asked).change(RECORD, change))


def _hold(task: str | Task, key: str | None, search: str, by: str | None) -> Hold:
    name = getattr(task, "name", task)
    for what, value in (("a task, its name or a pattern", name), ("a key", key)):
        if value is not None and not (isinstance(value, str) and value and value.isprintable()):
            raise InvalidQuery(f"expected {what}, got {value!r}")
    parse(search)
    return Hold(name, key, search, by=_caller() if by is None else by)


def _caller() -> str:
    try:
        user = getuser()
    except (KeyError, OSError, ImportError):  # a container's user without a name
        user = "unknown"
    return f"{user}@{gethostname()}"
