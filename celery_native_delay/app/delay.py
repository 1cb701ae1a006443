"""``Delay(app)``: list, cancel and reschedule waiting tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeAlias, TypeVar, overload

from celery import Celery, Task
from celery.canvas import Signature
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from ..due_time import check_due, due_us
from ..errors import (
    CannotDelay,
    DelayTooLong,
    InvalidDueTime,
    InvalidQuery,
    NativeDelayError,
    SettingsError,
    StoreUnavailable,
)
from ..keyed.record import name_of as name_of_key
from ..keyed.rules import is_far, keep
from ..now import time_ns
from ..rates.line import Asked, Line, RateLine, name_of, places_in
from ..rates.rate import Rate, key_text
from ..records import waiting
from ..records.interface import TRIES
from ..records.waiting import (
    AT_ONCE,
    Bar,
    DueTime,
    Edit,
    Outcome,
    Query,
    Verdict,
    Waiting,
    WaitingPage,
    WaitingTasks,
)
from ..settings import DelaySettings
from ..transports.aliases import delay_headers
from .holds import HoldCalls, Progress
from .installation import ask_broker, checked_app, installed
from .keyed import KeyedCalls, KeyKind, revoke_result
from .schedules import Schedules
from .story import story
from .updating import edit_of

T = TypeVar("T")

#: A search counts up to this many further matches, because reading all matches could take seconds.
_COUNTED = 1000

#: A task, given by its id, its ``AsyncResult`` or a :class:`Waiting`.
TaskId: TypeAlias = str | AsyncResult | Waiting

#: The verdicts about a task that may have been changed when the answer was lost.
_PERHAPS_LOST = (Verdict.UNKNOWN, Verdict.TOO_LATE)

#: The smallest and largest number of :class:`RateLine` objects to read, to find the longest lines.
_LEAST_LINES, _MOST_LINES = 500, 10_000

#: The largest number of tasks with one name that get new due times when a rate limit changes.
_MOST_MOVED = 100_000


class Delay(HoldCalls, KeyedCalls):
    """List, search, hold, cancel and reschedule waiting tasks. Send debounced or unique tasks.

    The tasks are read from where they wait: the Redis broker, or ``native_delay_store``. Tasks that
    wait in RabbitMQ, SQS or pgmq cannot be listed; :meth:`cancel` is durable for them beside a
    store.

    Every method raises :class:`~celery_native_delay.StoreUnavailable` if the waiting tasks cannot
    be read, and kombu's ``OperationalError`` if the app cannot connect to the broker, or gets no
    answer in time. Methods that change a task return an :class:`~celery_native_delay.Outcome`,
    which is truthy if the change was made.
    """

    def __init__(self, app: Celery) -> None:
        super().__init__(checked_app(app))
        self._sets_results = True

    # --- seeing --------------------------------------------------------------------------

    def ls(self, search: str | Query = "", *, limit: int = 50, offset: int = 0) -> WaitingPage:
        """List the waiting tasks that match *search*, earliest due time first.

        Args:
            search: words as in Flower's search box, such as ``name:shop.remind ada``, or a
                :class:`Query`. By default all tasks match.
            limit: the largest number of tasks to return.
            offset: the number of matching tasks to skip.

        Returns:
            a sequence of :class:`Waiting`, with an attribute *total*: the number of all
            matching tasks. If *search* has words, a name or a queue, *total* is None: use
            :meth:`count`.

        Raises:
            InvalidQuery: a malformed *search*, or a *limit* or *offset* that is negative or not an
                integer.
        """
        _check_count("limit", limit, least=0)
        _check_count("offset", offset, least=0)
        query = _query(search)
        page = self._ask(lambda found: found.page(query, offset=offset, limit=limit))
        return WaitingPage(tuple(self._with_pauses(page.tasks)), page.total)

    def show(self, task_id: TaskId) -> list[Waiting]:
        """Return the waiting messages of a task: usually one, none if the task is not waiting."""
        one = _id_of(task_id)
        return self._with_pauses(self._ask(lambda found: found.get(one)))

    def story(self, task_id: TaskId) -> list[str]:
        """Describe a task in sentences: where it is, and why it waits.

        For a task that is not waiting: the worker that has it, its result, or where it may be. This
        asks all workers, which takes a second.
        """
        one = _id_of(task_id)
        tasks, taken = self._ask(lambda found: (found.get(one), bool(found.taken([one]))))
        lines = self._lines_of(tasks)
        return story(self._app, one, _after_pauses(tasks, lines), lines=lines, taken=taken)

    def ids(self, search: str | Query = "", *, limit: int | None = None) -> list[str]:
        """Return up to *limit* ids (None: all) of tasks that match *search*, earliest first."""
        if limit is not None:
            _check_count("limit", limit, least=0)
        query = _query(search)
        return self._ask(lambda found: _some_of(found.ids(query), limit))

    def count(self, search: str | Query = "") -> int:
        """Return the number of waiting tasks that match *search*."""
        query = _query(search)
        return self._ask(lambda found: found.count(query))

    def histogram(self, *, bars: int = 40) -> list[Bar]:
        """Return a histogram of the due times of all waiting tasks, with at most *bars* bars."""
        _check_count("bars", bars, least=1)
        return self._ask(lambda found: waiting.histogram(found, bars=bars))

    def next_due(self) -> datetime | None:
        """Return the earliest due time of all waiting tasks; None if all of them are held."""
        span = self._ask(lambda found: found.span())
        if span is None or span[0] >= waiting.HELD_FROM_US:
            return None
        return datetime.fromtimestamp(span[0] / 1_000_000, UTC)

    def rates(self, *, limit: int = 50) -> list[RateLine]:
        """Return a :class:`RateLine` for each rate limit and key, most waiting tasks first.

        Args:
            limit: the largest number of ``RateLine`` objects to return.

        Raises:
            NoStore: the broker cannot store rate limits, and ``native_delay_store`` is not set.
        """
        _check_count("limit", limit, least=0)

        def looked(channel: Any, settings: DelaySettings) -> list[RateLine]:
            usual = {name: rate.shown for name, rate in _by_name(settings).items()}
            with closing(channel.lines(settings)) as lines:
                return [
                    replace(row, overridden=row.rate != usual.get(row.task, row.rate))
                    for row in lines.look(max(limit, _LEAST_LINES))[:limit]
                ]

        return ask_broker(self._app, looked)

    def schedules(self) -> Schedules:
        """Return the app's schedule entries, to list, pause, resume and run them.

        The methods of the result raise :class:`~celery_native_delay.NoStore` if the broker cannot
        store schedule entries, and ``native_delay_store`` is not set.
        """
        return Schedules(self._app)

    def set_rate(self, name: str, key: str | int | None, limit: str | None) -> int:
        """Change the limit of one key, such as ``set_rate("shop.call_api", "gold-corp", "500/m")``.

        Every worker uses the new limit at once. Waiting tasks of the key keep their order. With a
        higher limit, waiting tasks get earlier due times.

        Args:
            name: the *name* of the ``Rate``. By default, the name is the task's name. If a task has
                several rates without names, the second rate is named ``shop.call_api#2``.
            key: the key (str, int or bool), or None for a rate without a key, and for tasks
                without a key.
            limit: the new limit, or None for the limit in the settings. The burst does not change.

        Returns:
            the number of waiting tasks that got an earlier due time.

        Raises:
            SettingsError: *limit* or *key* is malformed, or ``native_delay_rates`` has no such
                name.
        """
        rates = _by_name(installed(self._app).settings())
        usual = rates.get(name)
        if usual is None:
            names = ", ".join(sorted(rates))
            raise SettingsError(
                f"expected the name of a rate in native_delay_rates ({names}), got {name!r}"
            )
        if not isinstance(key, str | int | None):
            raise SettingsError(f"expected the key to be str, int, bool or None, got {key!r}")
        try:
            key = None if key is None else key_text(key)
        except ValueError as exc:
            raise SettingsError(str(exc)) from exc
        rate = usual.for_key(key) if limit is None else replace(usual, limit=limit, overrides=None)
        return self._change_lines([Asked(name, key, rate)], sets=limit is not None)

    def end_pause(self, name: str, key: str | None) -> int:
        """End a pause of ``RetryAfter``, as :meth:`release` does; return the number of tasks."""
        rate = _by_name(installed(self._app).settings()).get(name)
        if rate is None:
            raise SettingsError(f"expected the name of a rate of this app, got {name!r}")
        return self._change_lines([Asked(name, key, rate.for_key(key))], change=Line.without_pause)

    def _change_lines(
        self,
        asked: Sequence[Asked],
        *,
        sets: bool | None = None,
        change: Callable[[Line, Rate, int], Line] = lambda line, *_: line,
    ) -> int:
        """Change rate limits of keys; return the number of tasks that got an earlier due time."""

        def decide(line: Line, rate: Rate, now_us: int) -> tuple[Line, tuple[Line, Rate]]:
            line = change(line, rate, now_us)
            return line, (line, rate)

        def changed_lines(channel: Any, settings: DelaySettings) -> list[tuple[Line, Rate]]:
            with closing(channel.lines(settings)) as lines:
                return [lines.change(each, decide, sets=sets) for each in asked]

        slots, changed = {}, set()
        for each, (line, rate) in zip(asked, ask_broker(self._app, changed_lines), strict=True):
            if sets is not None or not line.is_set:  # a deployment does not change set rates
                slots[each.line] = partial(line.slot_us, rate)
                changed.add(each.name)
        due = {
            each.id: at_us
            for task, its in installed(self._app).settings().rates_by_task.items()
            if not changed.isdisjoint(rate.name for rate in its)
            for each in self.ls(Query(name=task), limit=_MOST_MOVED)
            for name, place in places_in(each.place).items()
            if name in slots and (at_us := slots[name](place)) < each.due_us
        }

        return sum(map(bool, self._move(due, lambda task: _or_now(due[task.id])))) if due else 0

    def _with_pauses(self, tasks: Sequence[Waiting]) -> list[Waiting]:
        lines: list[RateLine] = []
        with suppress(NativeDelayError):  # then show the due times of the messages
            lines = self._lines_of(tasks)
        return _after_pauses(tasks, lines)

    def _lines_of(self, tasks: Sequence[Waiting]) -> list[RateLine]:
        """Return the state of each rate limit and key for which some of *tasks* wait."""
        names = list({name: None for task in tasks for name in places_in(task.place)})
        if not names:
            return []

        def looked(channel: Any, settings: DelaySettings) -> list[RateLine]:
            with closing(channel.lines(settings)) as lines:
                found: list[RateLine] = lines.look_at(names, time_ns() // 1000)
            return found

        return ask_broker(self._app, looked)

    # --- changing ------------------------------------------------------------------------

    @overload
    def cancel(self, task_id: TaskId) -> Outcome: ...

    @overload
    def cancel(self, *, key: str, task: str | Task | Signature, kind: KeyKind) -> Outcome: ...

    def cancel(
        self,
        task_id: TaskId | None = None,
        *,
        key: str | None = None,
        task: str | Task | Signature | None = None,
        kind: KeyKind | None = None,
    ) -> Outcome:
        """Cancel a waiting task, by its id or by its debounce, throttle or unique key.

        The task never runs, and the task's result becomes REVOKED at once. Later, a worker informs
        monitors and the task's chord, as for every revoked task.

        Args:
            task_id: an id, an ``AsyncResult``, or a :class:`Waiting` that :meth:`ls` returned.
            key: the key of the task. Give *key*, *task* and *kind* instead of *task_id*.
            task: the task, or the name of the task.
            kind: the method that sent the task: "debounce", "unique" or "throttle". For
                ``throttle(edge="trailing")``, give "throttle-trailing".

        Returns:
            the outcome. The outcome's *id* is "" if no task was sent with the key.

        Raises:
            UnsupportedBroker: *key* is given, but the broker cannot store keys, and
                ``native_delay_store`` is not set.
        """
        if key is None and task is None and kind is None:
            return self.cancel_all([_id_of(task_id)])[0]
        if task_id is not None or key is None or task is None or kind is None:
            raise TypeError("expected the id of a task, or all of key, task and kind")
        name = getattr(task, "name", task)
        if not isinstance(name, str):
            raise TypeError(f"expected a task or its name, got {task!r}")
        return self._cancel_key(key, name, kind)

    def cancel_all(
        self, task_ids: Iterable[TaskId], *, progress: Progress | None = None
    ) -> list[Outcome]:
        """Cancel many waiting tasks over one connection, each as in :meth:`cancel`.

        *progress* is called with the number of tasks done since the last call, and in all.
        """
        self._sets_results = True
        return self._change(task_ids, self._cancel, progress)

    def reschedule(
        self,
        task_id: TaskId,
        *,
        countdown: float | None = None,
        eta: datetime | str | None = None,
        by: float | None = None,
    ) -> Outcome:
        """Change the due time (``eta``) of a waiting task.

        Args:
            task_id: as in :meth:`cancel`.
            countdown: seconds from now. A negative countdown means now.
            eta: the new due time, in UTC if it has no time zone.
            by: seconds to add to the due time; negative: earlier, but not before now. Give one of
                *countdown*, *eta* and *by*.

        Raises:
            InvalidDueTime: *countdown* or *eta* is invalid. The task keeps its due time.
            DelayTooLong: the new due time is too far away. The task keeps its due time.
        """
        one = _id_of(task_id)
        return self.reschedule_all([one], countdown=countdown, eta=eta, by=by)[0]

    def reschedule_all(
        self,
        task_ids: Iterable[TaskId],
        *,
        countdown: float | None = None,
        eta: datetime | str | None = None,
        by: float | None = None,
        spread: float | None = None,
        progress: Progress | None = None,
    ) -> list[Outcome]:
        """Give many waiting tasks new due times, over one connection.

        Without *by* and *spread*, all are due at the same time.

        Args:
            task_ids: the tasks.
            countdown: as in :meth:`reschedule`, like *eta* and *by*. With *by*, each task is moved
                by so many seconds, and their spacing stays.
            spread: seconds over which the tasks are due one after the other, evenly and in the
                order of *task_ids*. The first is due after *countdown* or at *eta*, or now.
            progress: as in :meth:`cancel_all`.

        Raises:
            InvalidDueTime: an argument is invalid, or *by* is given with another one.
            DelayTooLong: as in :meth:`reschedule`.
        """
        ids = _ids_of(task_ids)
        if by is not None:
            if (countdown, eta, spread) != (None, None, None):
                raise InvalidDueTime("expected by alone, or countdown, eta or spread")
            return self._move(ids, _moved_by(by), progress=progress)
        if isinstance(countdown, int | float):
            countdown = max(countdown, 0)
        if spread is not None:
            _check_seconds("spread", spread, least=0.0)
            countdown = 0 if countdown is None and eta is None else countdown
        first_us = due_us(delay_headers(countdown=countdown, eta=eta)["eta"])
        step_us = (spread or 0) * 1_000_000 / max(len(ids) - 1, 1)
        due = {one: first_us + round(at * step_us) for at, one in enumerate(dict.fromkeys(ids))}
        check_due(
            max(due.values(), default=0),
            now_us=time_ns() // 1000,
            longest_delay_seconds=installed(self._app).settings().longest_delay_seconds,
        )
        return self._move(ids, lambda task: _or_now(due[task.id]), progress=progress)

    def update(
        self,
        task_id: TaskId,
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        priority: int | None = None,
        queue: str | None = None,
        expires: float | datetime | None = None,
    ) -> Outcome:
        """Change a waiting task itself. Arguments that are None stay as they are.

        The due time, the id, and everything else of the task stay. If the task starts meanwhile,
        the outcome is "too late", and it runs as it was.

        Args:
            task_id: as in :meth:`cancel`.
            args: all positional arguments.
            kwargs: all keyword arguments.
            priority: the priority, from 0 to 255.
            queue: the name of the queue, as in ``apply_async``.
            expires: seconds from now, or a time (UTC if it has no time zone).

        Raises:
            CannotDelay: the task cannot be changed so, for example because its arguments cannot be
                encoded. The task stays as it was.
        """
        edit = edit_of(
            self._app, args=args, kwargs=kwargs, priority=priority, queue=queue, expires=expires
        )
        return self._move([_id_of(task_id)], lambda task: task.due_us, edit)[0]

    def run_now(self, task_id: TaskId) -> Outcome:
        """Make a waiting task due now."""
        return self.run_all_now([_id_of(task_id)])[0]

    def run_all_now(
        self, task_ids: Iterable[TaskId], *, progress: Progress | None = None
    ) -> list[Outcome]:
        """Make many waiting tasks due now; *progress* is as in :meth:`cancel_all`."""
        return self._move(task_ids, lambda task: None, progress=progress)

    # --- private -------------------------------------------------------------------------

    def _cancel_key(self, key: str, task: str, kind: KeyKind) -> Outcome:
        reason = f"nothing waits for key {key!r} of {task} ({kind})"
        outcome = Outcome("", Verdict.UNKNOWN, reason=reason)
        for _ in range(TRIES):
            task_id = self._standing_id(kind, task, key)
            if task_id is None or task_id == outcome.id:
                break
            outcome = self.cancel(task_id)
            if outcome:
                break
            # Another call may have replaced the task meanwhile: look again.
        return outcome

    def _cancel(self, found: WaitingTasks, task_ids: Sequence[str]) -> list[Outcome]:
        outcomes = found.cancel(task_ids)
        for outcome in outcomes:
            self._revoke_result(outcome)
        return outcomes

    def _move(
        self,
        task_ids: Iterable[TaskId],
        due_us: DueTime,
        edit: Edit | None = None,
        progress: Progress | None = None,
    ) -> list[Outcome]:
        moved = self._change(task_ids, lambda found, ids: found.move(ids, due_us, edit), progress)
        self._keep_keys(moved)
        return moved

    def _keep_keys(self, moved: Iterable[Outcome]) -> None:
        """Keep the keys of tasks that now wait longer than a key is believed to be taken."""
        now_us = time_ns() // 1000
        kept = [
            (name_of_key(task.kind, task.name, task.key), partial(keep, task_id=task.id, due_us=at))
            for each in moved
            if is_far(at := each.due_us or 0, now_us)
            for task in each.tasks
            if task.key
        ]
        with suppress(StoreUnavailable, OperationalError):  # the tasks are moved all the same
            if kept:
                self._ask_keys(lambda records: [records.change(*each) for each in kept])

    def _change(
        self,
        task_ids: Iterable[TaskId],
        change: Callable[[WaitingTasks, Sequence[str]], list[Outcome]],
        progress: Progress | None = None,
    ) -> list[Outcome]:
        ids = _ids_of(task_ids)
        outcomes: list[Outcome] = []
        begun = -1

        def rest(found: WaitingTasks) -> list[Outcome]:
            nonlocal begun
            # If the connection breaks, this function runs again for the rest of the ids.
            for start in range(len(outcomes), len(ids), AT_ONCE):
                is_again, begun = start == begun, start
                some = ids[start : start + AT_ONCE]
                try:
                    changed = change(found, some)
                except (CannotDelay, DelayTooLong) as exc:  # raised for a single task
                    if len(ids) == 1:
                        raise
                    changed = [Outcome(some[0], Verdict.IMPOSSIBLE, reason=str(exc))]
                lost = [each.id for each in changed if each.verdict in _PERHAPS_LOST]
                if is_again and lost:
                    more = f" and {len(lost) - 1:,} more" if lost[1:] else ""
                    raise StoreUnavailable(
                        f"the connection broke while {lost[0]}{more} was being changed: it was "
                        f"changed, or it has run"
                    )
                outcomes.extend(changed)
                if progress is not None:
                    progress(len(changed), len(ids))
            return outcomes

        try:
            return self._ask(rest)
        except (StoreUnavailable, OperationalError) as exc:
            if not outcomes:
                raise
            done = sum(map(bool, outcomes))
            number = f"at least {done:,} of {len(ids):,}"  # the step that failed may be done, too
            raise type(exc)(f"{number} were changed; then {exc}") from exc

    def _ask(self, question: Callable[[WaitingTasks], T]) -> T:
        def ask(channel: Any, settings: DelaySettings) -> T:
            with closing(channel.waiting_tasks(settings)) as found:
                return question(found)

        return ask_broker(self._app, ask)

    def _revoke_result(self, outcome: Outcome) -> None:
        """Set results of cancelled tasks to REVOKED; do nothing after the result backend failed."""
        # After a failure, workers set the results: a call to a failing backend may take minutes.
        for task in outcome.tasks:
            if self._sets_results and task.name and task.keeps_result:
                self._sets_results = revoke_result(self._app, task.id, task.name, reason="revoked")


def listed(delay: Delay, query: Query, offset: int, limit: int) -> tuple[WaitingPage, bool]:
    """Return a page of tasks that match *query*, and True if the page's *total* is exact.

    If the second value is False, *total* is a lower bound.
    """
    searched = not query.is_by_time_only
    page = delay.ls(query, limit=limit + (_COUNTED if searched else 0), offset=offset)
    total = page.total
    if total is None:  # an offset beyond the last match does not tell the number of matches
        behind = offset and not page.tasks
        total = delay.count(query) if behind else offset + len(page.tasks)
    counted = not searched or len(page.tasks) < limit + _COUNTED
    return WaitingPage(page.tasks[:limit], total), counted


def adopt_rates(app: Celery) -> Callable[[], int] | None:
    """Return a function that updates waiting tasks' due times; None if no limit has changed.

    A starting worker calls adopt_rates before it receives rate-limited tasks. The first task of a
    key stores the new limit, and adopt_rates then no longer sees the change.
    """
    delay, rates = Delay(app), _by_name(installed(app).settings())
    rows = [row for row in delay.rates(limit=_MOST_LINES) if row.waiting and row.task in rates]
    asked = [Asked(row.task, row.key, rates[row.task].for_key(row.key)) for row in rows]
    changed = [each for each, row in zip(asked, rows, strict=True) if each.rate.shown != row.rate]
    return partial(delay._change_lines, changed) if changed else None


def _after_pauses(tasks: Sequence[Waiting], lines: Sequence[RateLine]) -> list[Waiting]:
    """Return *tasks*; if ``RetryAfter`` delays a task, its due time is the pause's end."""
    until_us = {name_of(line.task, line.key): line.held_until_us or 0 for line in lines}
    return [
        replace(
            task,
            due_us=max(task.due_us, *(until_us.get(name, 0) for name in places_in(task.place)), 0),
        )
        for task in tasks
    ]


def _by_name(settings: DelaySettings) -> dict[str, Rate]:
    return {str(rate.name): rate for its in settings.rates_by_task.values() for rate in its}


def _some_of(ids: Iterable[str], limit: int | None) -> list[str]:
    found: dict[str, None] = {}
    for task_id in ids:
        if len(found) == limit:
            break
        found[task_id] = None
    return list(found)


def _query(search: str | Query) -> Query:
    if isinstance(search, Query):
        return search
    if not isinstance(search, str):
        raise InvalidQuery(f"expected a search as text or as a Query, got {search!r}")
    return Query.parse(search)


def _check_count(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise InvalidQuery(f"expected {name} to be a whole number from {least}, got {value!r}")


def _check_seconds(name: str, value: object, *, least: float = -math.inf) -> None:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    if not is_number or value < least:  # type: ignore[operator]
        text = "seconds" if least < 0 else f"seconds from {least:g}"
        raise InvalidDueTime(f"expected {name} in {text}, got {value!r}")


def _moved_by(seconds: float) -> DueTime:
    """Return a rule that moves each message once, however often it is asked about it."""
    _check_seconds("by", seconds)
    moved_us: dict[str, int] = {}

    def rule(task: Waiting) -> int | None:
        if task.held:
            raise CannotDelay(f"expected a task that is not held, got {task.id}: release it first")
        then_us = task.due_us + round(seconds * 1_000_000)
        return _or_now(moved_us.setdefault(task.delivery_id, then_us))

    return rule


def _or_now(at_us: int) -> int | None:
    return at_us if at_us > time_ns() // 1000 else None


def _id_of(task: object) -> str:
    if isinstance(task, AsyncResult | Waiting):
        return str(task.id)
    if isinstance(task, str) and task:
        return task
    raise TypeError(f"expected the id of a task, or its AsyncResult, got {task!r}")


def _ids_of(tasks: object) -> list[str]:
    if isinstance(tasks, str | bytes | AsyncResult | Waiting) or not isinstance(tasks, Iterable):
        raise TypeError(f"expected the ids of tasks, such as a list of them, got {tasks!r}")
    return [_id_of(task) for task in tasks]
