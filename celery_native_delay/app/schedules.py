"""Reads, publishes, lists, pauses and runs the schedule entries of an app."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from inspect import getattr_static
from typing import Any, NamedTuple, TypeVar

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Task, uuid
from celery.beat import _evaluate_entry_args, _evaluate_entry_kwargs
from celery.schedules import maybe_schedule
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError

from ..errors import (
    CannotDelay,
    NativeDelayError,
    SettingsError,
    StoreUnavailable,
    described,
    why,
)
from ..now import moment, time_ns
from ..records.interface import Change, RecordName, Records, Snapshot, tried_again
from ..records.publishing import RecordedPublish, publishing
from ..schedules.entry import ScheduleEntry, parsed
from ..schedules.release import GONE_US, Release, Rival, rivalled, taken_over
from ..schedules.state import (
    BEAT_TASK,
    HEADER,
    KEPT_US,
    VERSION,
    Discarded,
    State,
    advanced,
    left_out,
    paused,
    planned,
    refused,
    resumed,
    sent_again,
    swapped,
    why_dropped,
)
from ..settings import DelaySettings
from ..texts import is_text, storable
from ..transports.interface import without_store
from .beat import SettingsScheduler, entry_or_why, scheduler_class
from .installation import ask_broker, delaying_channel, installed

logger = get_logger(__name__)

T = TypeVar("T")

#: The last task that a worker received from ``celery beat`` is stored for an hour.
_BEAT_KEPT_US = 3_600_000_000


def schedule_records(channel: Any, settings: DelaySettings) -> Records:
    """Return the state of schedule entries; raise NoStore without a store."""
    if not hasattr(channel, "records"):  # a channel of kombu itself
        raise without_store(channel)
    found: Records = channel.records(settings)
    return found


class Scheduled(NamedTuple):
    """A schedule entry with its last and next run, as :meth:`Delay.schedules` returns it.

    *schedule* is a text such as ``every 10 s``. *task_id* is the id of the waiting task. *next_due*
    and *task_id* are None if the schedule entry is paused or has ended. *late_seconds* is the time
    since *next_due*; 0 if *next_due* is None or in the future. *problem* is the reason why the
    entry cannot be read or published, or None. *left_out* is the reason why the last run did not
    happen, or None; *left_outs* is the number of such runs up to the last one that happened.
    *is_added* is True if :meth:`Schedules.add` made the entry, and False for an entry of the code.
    """

    name: str
    task: str
    schedule: str
    last_run: datetime | None
    next_due: datetime | None
    runs: int
    is_paused: bool
    late_seconds: float
    task_id: str | None
    problem: str | None = None
    left_out: str | None = None
    left_outs: int = 0
    is_added: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a dict for JSON, with times in ISO 8601."""
        times = {"last_run": self.last_run, "next_due": self.next_due}
        return self._asdict() | {name: each and each.isoformat() for name, each in times.items()}


class Schedules:
    """The schedule entries of an app; the next run of each entry waits in the broker.

    Apps with different names (``app.main``) have entries of their own. *whose* is the name of
    another app, whose messages reach a worker of *app*.
    """

    def __init__(self, app: Any, connection: Any = None, *, whose: str | None = None) -> None:
        self._app = app
        own = str(app.main or "")
        self._whose = own if whose is None else whose
        self._is_own = self._whose == own
        #: The records of the app: its release, a rival release, and beat's last task.
        self._release_name, self._rival_name, self._beat_name, self._added_name = (
            RecordName("schedules", f"{self._whose}/{kind}")
            for kind in ("release", "rival", "beat", "added")
        )
        self._connection = connection  # by default one of the app's pool
        self._settings = installed(app).settings()
        self._scheduler: Any = None
        self._entries: dict[str, ScheduleEntry] = {}
        self._published: Release | None = None
        self._has_told_of_rival = False

    # --- for users -----------------------------------------------------------------------

    def __iter__(self) -> Iterator[Scheduled]:
        """Yield the schedule entries, sorted by name."""
        release = self._release()
        of_code = Release.from_text(release.text).names
        for name, state in self._states(tuple(sorted({*of_code, *self._added()}))):
            if state is not None:
                shown = self._shown(name, state, release.now_us)
                yield shown._replace(is_added=name not in of_code)

    def add(
        self,
        name: str,
        task: str,
        schedule: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a schedule entry, which stays until :meth:`remove`, also after deployments.

        Args:
            name: a new name.
            task: the name of the task.
            schedule: a text as the list shows it, such as ``30 2 * * *``, ``every 10 s`` or
                ``30 2 * * * Europe/Berlin`` (default: the app's time zone), or a schedule as in
                ``beat_schedule``.
            args: the arguments of the task, which JSON can hold, like *kwargs* and *options*.
            kwargs: the keyword arguments of the task.
            options: options of ``apply_async``.

        Raises:
            SettingsError: an argument is malformed, the name is taken, or the app has no
                ``native_delay_schedules``.
            CannotDelay: JSON cannot hold the schedule or an argument.
        """
        when, zone = self._parsed(schedule)
        self.add_entry(
            ScheduleEntry(
                name, task, when, zone, list(args), dict(kwargs or {}), dict(options or {})
            )
        )

    def change(
        self,
        name: str,
        task: str | None = None,
        schedule: Any = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Change an entry that :meth:`add` made. Arguments that are None stay as they are.

        A waiting run is replaced. If the schedule stays, so does the next due time.

        Raises:
            KeyError: the name is unknown.
            SettingsError: as in :meth:`add`, or the entry is one of the code.
            CannotDelay: as in :meth:`add`.
        """
        entry = self._entry_of(name, self._known_added(name))
        given: dict[str, Any] = {"task": task, "args": args, "kwargs": kwargs, "options": options}
        entry = replace(entry, **{key: each for key, each in given.items() if each is not None})
        if schedule is not None:
            when, zone = self._parsed(schedule)
            entry = replace(entry, schedule=when, zone=zone, starts_us=None)
        self._check_stored(entry)
        with _options_checked(entry):
            self._change(name, lambda state, now_us: state and planned(state, entry, now_us))

    def remove(self, name: str) -> None:
        """Remove an entry of :meth:`add`, with its waiting run. Raises as :meth:`change`."""
        self._known_added(name)
        self._remove(self._name(name))
        self._note_added(name, is_there=False)

    def pause(self, name: str) -> None:
        """Pause a schedule entry until :meth:`resume`. Raises KeyError for an unknown name."""
        self._known(name)
        self._change(name, lambda state, _: state and paused(state))

    def resume(self, name: str) -> None:
        """Resume a paused schedule entry. Raises KeyError for an unknown name."""
        entry = self._entry_of(name, self._known(name))
        self._change(name, lambda state, now_us: state and resumed(state, entry, now_us))

    def run_now(self, name: str) -> str:
        """Run the task of a schedule entry once more now, and return the task's id.

        The next due time does not change. Raises KeyError for an unknown name.
        """
        entry = self._entry_of(name, self._known(name))
        return self._send(entry, self._sender(entry.task), uuid(), time_ns() // 1000, {})

    def remove_all(self) -> int:
        """Remove all schedule entries with their waiting messages; return the number of entries."""
        names = self._names()
        for name in (*map(self._name, names), self._release_name, self._added_name):
            self._remove(name)
        return len(names)

    # --- for workers and checks ----------------------------------------------------------

    def add_entry(self, entry: ScheduleEntry, *, is_paused: bool = False) -> None:
        """Add *entry*; errors as in :meth:`add`."""
        if (reason := self.why_not(entry)) is not None:
            raise SettingsError(reason)
        self._note_added(entry.name)
        try:
            with _options_checked(entry):
                self._change(
                    entry.name,
                    lambda state, now: planned(state or State("", paused=is_paused), entry, now),
                )
        except CannotDelay:
            self._note_added(entry.name, is_there=False)
            raise

    def why_not(self, entry: ScheduleEntry) -> str | None:
        """Return why the name of *entry* is taken, or None; raise if the entry itself is wrong."""
        self._check_stored(entry)
        ((_, state),) = self._states((entry.name,))
        if entry.name in {*self._of_code(), *self._read_entries()}:
            return f"expected a new name, got {entry.name!r}: the app's code has this entry"
        if state is not None and entry.name in self._added():
            return f"expected a new name, got {entry.name!r}: change or remove this entry"
        return None

    def publish(self) -> None:
        """Publish messages of new and changed schedule entries, and replace lost messages.

        If another release of the app has a newer schedule (see ``native_delay_schedules``),
        this method only replaces lost messages.
        """
        ours = Release.of(self._settings.schedules_version, self._read_entries())
        rule = partial(taken_over, ours=ours, is_new=ours != self._published)
        before = self._release()
        # Removed first: if this process dies, the next one finds the old names, and goes on.
        for name in rule(before).answer.removed:
            self._remove(self._name(name))
            logger.info("native delay: schedule entry %s is removed", name)
        in_force = self._ask(lambda records: records.change(self._release_name, rule))
        for name, known in self._states(tuple(dict.fromkeys((*in_force.names, *self._added())))):
            entry = self._entries.get(name) if in_force.is_ours else None

            def wanted(
                state: State | None, now_us: int, entry: ScheduleEntry | None = entry
            ) -> State | None:
                found = entry and planned(state, entry, now_us)
                return found or (state and sent_again(state, now_us))

            try:
                if wanted(known, before.now_us) is not None:
                    self._change(name, wanted)
            except (StoreUnavailable, OperationalError, SoftTimeLimitExceeded):
                raise  # the next look tries again
            except Exception as exc:  # a wrong entry leaves the others alone
                logger.error("native delay: schedule entry %s is not published: %s", name, why(exc))
                self._note_problem(name, why(exc))
        self._published = ours
        if in_force.is_tie:
            rivalling = partial(rivalled, names=ours.names)
            lasts = self._ask(lambda records: records.change(self._rival_name, rivalling))
            lost = ours.names if lasts else ()
        else:
            lost = self.rival()
        if lost and not self._has_told_of_rival:
            text = "native delay: another configuration of the app %r runs, too: %s do not run"
            entries = [name for name in lost if name not in in_force.names]
            logger.warning(text, self._whose, ", ".join(entries) or "its changed entries")
        self._has_told_of_rival = bool(lost)

    def of(self, whose: str) -> Schedules:
        """Return the entries of the app with the name *whose*."""
        return self if whose == self._whose else Schedules(self._app, whose=whose)

    def advance(
        self,
        name: str,
        number: int,
        task_id: str,
        *,
        redelivered: bool,
        discarded: Discarded | None = None,
    ) -> str | None:
        """Publish a schedule entry's next message when a worker receives the current message.

        *number* is the position of the received message in the entry's series of messages.
        *redelivered* is True if the broker delivers the message again. *discarded* is set if Celery
        will not run the task. Returns None, or the reason why the worker must drop the received
        message.

        If the next message cannot be published, the received one runs all the same. The entry then
        shows the problem, and :meth:`publish` tries again.
        """
        if not self._is_own and self.seconds_since_look() * 1_000_000 > GONE_US:
            return f"its app {self._whose!r} has no worker any more"
        catch_up = self._settings.schedules_catch_up
        deadline_seconds = self._app.conf.beat_cron_starting_deadline
        deadline_us = None if deadline_seconds is None else round(deadline_seconds * 1_000_000)

        def rule(state: State | None, now_us: int) -> State | None:
            if state is None and self._release().text is None:  # the records were lost: go on
                ours = (self._entries or self._read_entries()).get(name)
                state = None if ours is None else State(ours.text, number=number, due_us=now_us)
            if state is None or not state.waits_for(number):
                return None
            entry = self._entry_of(name, state)
            return advanced(
                state, entry, task_id, now_us, catch_up, discarded, deadline_us=deadline_us
            )

        try:
            before, after = self._change(name, rule)
        except (StoreUnavailable, OperationalError, SoftTimeLimitExceeded):
            raise
        except Exception as exc:  # of the next run, which must not hold up this one
            logger.error("native delay: schedule entry %s is not published: %s", name, why(exc))
            before, after = self._change(name, rule, problem=why(exc))
        return why_dropped(before, after, task_id, redelivered=redelivered)

    def send_anew(self, name: str, task: str, task_id: str) -> str | None:
        """Send a due run by the ``apply_async`` of its task's class, as beat does.

        Such an ``apply_async`` may take a lock, or choose options for this moment. Returns the
        reason why the worker must drop the message that was due; None if the task has Celery's own
        ``apply_async``, so that the message itself is the run.
        """
        if _has_celerys_apply_async(self._app.tasks.get(task)):
            return None
        entry = self._entry_of(name, self._known(name))
        from_us = time_ns() // 1000 - entry.countdown_us
        try:
            self._send(entry, self._sender(task), task_id, from_us, {})
        except (StoreUnavailable, OperationalError, SoftTimeLimitExceeded):
            raise
        except Exception as exc:  # such as "already queued"; beat goes on, too
            reason = f"apply_async of its class raised {described(exc)}"
            logger.error("native delay: a run of schedule entry %s is not sent: %s", name, why(exc))
            self.note_left_out(name, task_id, reason)
            return reason
        return "apply_async of its class sends it"

    def note_left_out(self, name: str, task_id: str, reason: str | None) -> None:
        """Store that a due run did not happen after all; *reason* is None if it was cancelled."""
        rule = partial(left_out, task_id=task_id, why=reason)
        self._ask(lambda records: records.change(self._name(name), rule))

    def note_run(self, name: str) -> None:
        """Count an entry's run in the beat scheduler's database, such as django-celery-beat's."""
        if name not in self._entries or type(self._scheduler) is SettingsScheduler:
            return
        entry = self._scheduler.schedule.get(name)
        if entry is None:
            return
        model: Any = getattr(entry, "model", None)
        if not hasattr(model, "refresh_from_db"):
            later = self._scheduler.reserve(entry)
            self._scheduler.sync()
            if getattr(model, "one_off", False):
                later.is_due()  # sqlalchemy-celery-beat then disables the entry
            return
        model.refresh_from_db()
        # ModelEntry.save() writes all columns, and could undo a change made in the meantime.
        noted = ["last_run_at", "total_run_count"]
        model.last_run_at, model.total_run_count = entry._default_now(), model.total_run_count + 1
        model.no_changes = not model.one_off
        if model.one_off:  # in one step, so that an enabled entry is one that a user enabled again
            model.enabled, model.total_run_count = False, 0
            noted += ["enabled", "date_changed"]
        model.save(update_fields=noted)

    def note_beat(self, name: str) -> None:
        """Store the name of a schedule entry or task that ``celery beat`` has sent."""
        if name in self._entries or name in [entry.task for entry in self._entries.values()]:
            beat = Change(name, time_ns() // 1000 + _BEAT_KEPT_US, None)
            self._ask(lambda records: records.change(self._beat_name, lambda _: beat))

    def beat(self) -> str | None:
        """Return which entry or task ``celery beat`` sent within the last hour, or None."""
        return self._ask(lambda records: records.load([self._beat_name]))[0]

    def seconds_since_look(self) -> float:
        """Return the seconds since a worker of the app last looked after the entries."""
        found = self._release()
        return (found.now_us - Release.from_text(found.text).looked_us) / 1_000_000

    def rival(self) -> tuple[str, ...]:
        """Return the entries of workers of the same app that have had no say for five minutes."""
        found = self._ask(lambda records: records.read(self._rival_name))
        rival = Rival.from_text(found.text)
        return rival.names if rival is not None and rival.lasts(found.now_us) else ()

    def missing(self) -> list[str]:
        """Return the names of the app's schedule entries whose task no worker has published yet."""
        self._app.loader.import_default_modules()
        self._app.finalize()
        states = self._states(tuple(sorted(self._read_entries())))
        return [name for name, state in states if state is None]

    # --- Celery's entries ----------------------------------------------------------------

    def _read_entries(self) -> dict[str, ScheduleEntry]:
        if not self._is_own:
            return {}
        if self._scheduler is None:
            self._scheduler = scheduler_class(self._app)(  # as Celery's beat makes it
                app=self._app,
                schedule_filename=self._app.conf.beat_schedule_filename,
                max_interval=self._app.conf.beat_max_loop_interval,
                lazy=False,
            )
        elif type(self._scheduler) is SettingsScheduler:
            return self._entries  # the entries of Celery's settings stay the same
        found = {storable(str(name)): each for name, each in self._scheduler.schedule.items()}
        zone = self._app.timezone
        self._entries = {name: entry_or_why(name, each, zone) for name, each in found.items()}
        return self._entries

    def _entry_of(self, name: str, state: State) -> ScheduleEntry:
        entries = self._entries or self._read_entries()
        ours = entries.get(name)
        if ours is not None and state.entry in ("", ours.text):
            return ours
        try:
            found = ScheduleEntry.from_text(state.entry)
        except SoftTimeLimitExceeded:
            raise
        except Exception as exc:  # of another release, or of a machine with other time zones
            raise CannotDelay(f"cannot read the schedule entry {name!r}: {described(exc)}") from exc
        if found is not None:
            return found
        raise CannotDelay(
            f"expected the schedule entry {name!r} in this process too: JSON cannot hold its "
            f"schedule or its arguments"
        )

    def _shown(self, name: str, state: State, now_us: int) -> Scheduled:
        problem = state.problem
        try:
            entry = self._entry_of(name, state)
            task, words = entry.task, entry.words
        except SoftTimeLimitExceeded:
            raise
        except Exception as exc:  # the other entries can be shown
            task, words, problem = "?", "?", problem or why(exc)
        due_us, last_us = state.due_us, state.last_us
        return Scheduled(
            name,
            task,
            words,
            moment(last_us) if last_us else None,
            None if due_us is None else moment(due_us),
            state.runs,
            state.paused,
            0.0 if due_us is None else max(now_us - due_us, 0) / 1_000_000,
            state.id,
            problem,
            state.left_out,
            state.left_outs if state.left_out else 0,
        )

    # --- records and messages ------------------------------------------------------------

    def _ask(self, question: Callable[[Records], T]) -> T:
        if self._connection is not None:
            return question(schedule_records(*delaying_channel(self._app, self._connection)))
        return ask_broker(self._app, lambda *channel: question(schedule_records(*channel)))

    def _release(self) -> Snapshot:
        return self._ask(lambda records: records.read(self._release_name))

    def _of_code(self) -> tuple[str, ...]:
        return Release.from_text(self._release().text).names

    def _added(self) -> tuple[str, ...]:
        """Return the names of the entries of :meth:`add`; an entry of the code may hide one."""
        found = self._ask(lambda records: records.read(self._added_name))
        return tuple(json.loads(found.text or "[]"))

    def _note_added(self, name: str, *, is_there: bool = True) -> None:
        def noted(snapshot: Snapshot) -> Change[None]:
            names = {*json.loads(snapshot.text or "[]")} - {name}
            names |= {name} if is_there else set()
            return Change(json.dumps(sorted(names)), snapshot.now_us + KEPT_US, None)

        self._ask(lambda records: records.change(self._added_name, noted))

    def _names(self) -> tuple[str, ...]:
        return tuple(sorted({*self._of_code(), *self._added()}))

    def _known_added(self, name: str) -> State:
        state = self._known(name)
        if name in self._of_code():
            raise SettingsError(
                f"expected an entry that was added at run time, got {name!r} of the app's code: "
                f"change beat_schedule, or pause the entry"
            )
        return state

    def _parsed(self, schedule: Any) -> tuple[Any, Any]:
        if isinstance(schedule, str):
            when, zone = parsed(schedule)
            return when, zone or self._app.timezone
        try:
            when = maybe_schedule(schedule, app=self._app)
        except (TypeError, ValueError) as exc:
            raise SettingsError(f"expected a schedule, got {schedule!r}: {exc}") from exc
        return when, getattr(when, "tz", None) or self._app.timezone

    def _check_stored(self, entry: ScheduleEntry) -> None:
        """Raise if workers cannot run an entry that they only know from the store."""
        if not self._settings.schedules:
            raise SettingsError(
                "expected native_delay_schedules = True, without which no worker runs schedule "
                "entries: set it in workers and here"
            )
        if not (is_text(entry.name) and entry.name and is_text(entry.task) and entry.task):
            raise SettingsError(
                f"expected a name and the name of a task, got {entry.name!r} and {entry.task!r}"
            )
        if ScheduleEntry.from_text(entry.text) is None:
            raise CannotDelay(
                f"expected a schedule and arguments that JSON can hold, for the entry "
                f"{entry.name!r}: otherwise put it into beat_schedule"
            )
        try:
            next_us, why_none = entry.next_us(time_ns() // 1000), ""
        except (TypeError, ValueError, OverflowError) as exc:  # such as a countdown of "5"
            next_us, why_none = None, f", countdown {entry.options.get('countdown')!r}: {exc}"
        if next_us is None:
            raise SettingsError(
                f"expected a schedule that is due some day, got {entry.words!r}{why_none}"
            )

    def _states(self, names: tuple[str, ...]) -> Iterator[tuple[str, State | None]]:
        found = self._ask(lambda records: records.load([self._name(name) for name in names]))
        return zip(names, map(State.from_text, found), strict=True)

    def _name(self, entry: str) -> RecordName:
        return RecordName("schedule", f"{self._whose}/{entry}")

    def _remove(self, name: RecordName) -> None:
        self._ask(lambda records: records.change(name, _removed))

    def _note_problem(self, name: str, problem: str) -> None:
        rule = partial(refused, problem=problem)
        self._ask(lambda records: records.change(self._name(name), rule))

    def _known(self, name: str) -> State:
        state = next(self._states((name,)))[1] if is_text(name) else None
        if state is None:
            known = ", ".join(self._names()) or "none"
            raise KeyError(f"expected the name of a schedule entry, got {name!r}; known: {known}")
        return state

    def _change(
        self,
        name: str,
        rule: Callable[[State | None, int], State | None],
        *,
        problem: str | None = None,
    ) -> tuple[State | None, State | None]:
        """Call the function *rule* with a schedule entry's state, and store the result.

        *rule* also gets the time in microseconds since the epoch, by the clock of the records: the
        clocks of workers differ. If *rule* returns None, the stored state does not change. If
        *problem* is set, it is stored, and no message is published. Returns the state before the
        call and the result of *rule*.
        """

        def attempt() -> tuple[State | None, State | None] | None:
            found = self._ask(lambda records: records.read(self._name(name)))
            before = State.from_text(found.text)
            after = rule(before, found.now_us)
            if after is None:
                return before, after
            after = after if problem is None else replace(after, problem=problem)
            return (before, after) if self._put(name, before, after) else None

        return tried_again(name, attempt)

    def _put(self, name: str, before: State | None, after: State) -> bool:
        """Replace the stored state *before* by *after*, and publish the next message, if any.

        A state with a problem has no message. Returns False, and changes nothing, if another
        process has replaced *before*.
        """
        has_message = after.due_us is not None and after.problem is None
        after = replace(after, id=uuid() if has_message else None)
        rule = partial(swapped, before=before, after=after)
        if after.id is None or after.due_us is None:
            return self._ask(lambda records: records.change(self._name(name), rule))
        mark = {"v": VERSION, "app": self._whose, "entry": name, "number": after.number}
        headers = {BEAT_TASK: True, HEADER: mark}
        publish = RecordedPublish(after.id, self._name(name), rule)
        with publishing(publish):
            entry = self._entry_of(name, after)
            send = self._sender(entry.task, own=False)
            self._send(entry, send, after.id, after.due_us - entry.countdown_us, headers)
        return bool(publish.answer)

    def _sender(self, task: str, *, own: bool = True) -> Callable[..., Any]:
        """Return ``apply_async`` of a task: its class's *own*, or Celery's."""
        found = self._app.tasks.get(task)
        if found is None:
            return partial(self._app.send_task, task)
        if own:
            send: Callable[..., Any] = found.apply_async
            return send
        if self._app.conf.task_always_eager:
            raise CannotDelay("expected task_always_eager off: with it, a run cannot wait")
        return partial(Task.apply_async, found)

    def _send(
        self,
        entry: ScheduleEntry,
        send: Callable[..., Any],
        task_id: str,
        from_us: int,
        headers: dict[str, Any],
    ) -> str:
        """Send the task of *entry*, whose expiry counts from epoch time *from_us*."""
        options = {key: value for key, value in entry.options.items() if key not in _OURS}
        beats = {"periodic_task_name": entry.name, **headers}
        options["headers"] = {**(options.get("headers") or {}), **beats}
        # Celery would count the expiry of the decorator or of task_annotations from the publish.
        of_task = getattr(self._app.tasks.get(entry.task), "expires", None)
        expires = options.get("expires", of_task)
        if isinstance(expires, int | float):
            options["expires"] = moment(from_us) + timedelta(seconds=expires)
        if isinstance(options.get("expiration"), int | float):  # of the message
            since_s = (from_us - time_ns() // 1000) / 1_000_000
            options["expiration"] = max(options["expiration"] + since_s, 0.0)
        args, kwargs = _evaluate_entry_args(entry.args), _evaluate_entry_kwargs(entry.kwargs)
        send(args, kwargs, task_id=task_id, **options)
        return task_id


_OURS = ("countdown", "eta", "task_id")


@contextmanager
def _options_checked(entry: ScheduleEntry) -> Iterator[None]:
    """Raise CannotDelay if the task of *entry* cannot be sent with its options."""
    try:
        yield
    except (NativeDelayError, OperationalError, SoftTimeLimitExceeded):
        raise
    except Exception as exc:  # of Celery or kombu, which do not check them
        raise CannotDelay(
            f"expected options of apply_async for the entry {entry.name!r}, got "
            f"{dict(entry.options)!r}: {described(exc)}"
        ) from exc


def _has_celerys_apply_async(task: Any) -> bool:
    """Return True if calling *task* runs no ``apply_async`` but Celery's; also if it is unknown."""
    return task is None or (
        "apply_async" not in vars(task)
        and getattr_static(type(task), "apply_async") is getattr_static(Task, "apply_async")
    )


def _removed(snapshot: Snapshot) -> Change[None]:
    return Change(None, 0, None, replaces=bool(snapshot.messages))
